#include "pinion/hooks/guarded_storage.h"

#include <cstdint>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "pinion/allocator/base/check.h"
#include "pinion/device/process_exit.h"

namespace pinion {
namespace {

constexpr absl::Duration kHostWait = absl::Seconds(60);

}  // namespace

GuardedStorage::GuardedStorage(GuardedStorage&& other) noexcept { *this = std::move(other); }

GuardedStorage& GuardedStorage::operator=(GuardedStorage&& other) noexcept {
  if (this == &other) return *this;
  Drop();
  storages_ = std::move(other.storages_);
  other.storages_.clear();
  stream_ = other.stream_;
  copy_ = std::exchange(other.copy_, Transfer());
  site_ = other.site_;
  return *this;
}

GuardedStorage::~GuardedStorage() { Drop(); }

void GuardedStorage::Add(GuardedStorage other) {
  for (c10::Storage& storage : other.storages_) storages_.push_back(std::move(storage));
  other.storages_.clear();
  if (other.copy_.ticket().value > copy_.ticket().value) copy_ = std::move(other.copy_);
}

void GuardedStorage::Drop() {
  if (storages_.empty()) return;
  const bool exiting = ProcessIsExiting();
  absl::Status waited = exiting ? absl::OkStatus() : copy_.WaitOn(stream_->native, site_);
  // An error that passes costs time, not memory.
  if (!waited.ok()) waited = copy_.Wait(kHostWait);
  if (exiting || !waited.ok()) {
    uint64_t leaked_bytes = 0;
    for (c10::Storage& storage : storages_) {
      leaked_bytes += storage.nbytes();
      storage.unsafeReleaseStorageImpl();
    }
    if (!exiting) {
      PINION_LOG(kError) << "leaking " << leaked_bytes
                         << " bytes of device memory: a copy may still touch them (" << waited
                         << ")";
    }
  }
  storages_.clear();
  copy_ = Transfer();
}

}  // namespace pinion
