#include "pinion/engine/tier/guarded_memory.h"

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

GuardedMemory& GuardedMemory::operator=(GuardedMemory&& other) noexcept {
  if (this == &other) return *this;
  if (first_) Drop();
  first_ = std::move(other.first_);
  rest_ = std::move(other.rest_);
  stream_ = other.stream_;
  copy_ = std::move(other.copy_);
  site_ = other.site_;
  return *this;
}

void GuardedMemory::Add(GuardedMemory&& other) {
  if (!other) return;
  Add(std::move(other.first_));
  for (DeviceMemory& memory : std::exchange(other.rest_, {})) Add(std::move(memory));
  if (other.copy_.number() > copy_.number()) copy_ = std::move(other.copy_);
}

void GuardedMemory::Drop() {
  const bool exiting = ProcessIsExiting();
  absl::Status waited = exiting ? absl::OkStatus() : copy_.WaitOn(stream_, *site_);
  // The host waits as a fallback: a transient error costs time, not memory.
  if (!waited.ok()) waited = copy_.Wait(kHostWait);
  if (exiting || !waited.ok()) {
    uint64_t leaked_bytes = first_.size_bytes();
    first_.Leak();
    for (DeviceMemory& memory : rest_) {
      leaked_bytes += memory.size_bytes();
      memory.Leak();
    }
    if (!exiting) {
      PINION_LOG(kError) << "leaking " << leaked_bytes
                         << " bytes of device memory: a copy may still touch them (" << waited
                         << ")";
    }
  }
  Disarm();
  copy_ = Transfer();
}

void AddByStream(GuardedMemory&& memory, GuardedMemories& all) {
  if (!memory) return;
  if (!all.empty() && all.back().stream() == memory.stream()) {
    all.back().Add(std::move(memory));
  } else {
    all.push_back(std::move(memory));
  }
}

}  // namespace pinion
