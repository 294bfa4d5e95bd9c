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

GuardedMemory::GuardedMemory(GuardedMemory&& other) noexcept { *this = std::move(other); }

GuardedMemory& GuardedMemory::operator=(GuardedMemory&& other) noexcept {
  if (this == &other) return *this;
  Drop();
  memory_ = std::move(other.memory_);
  other.memory_.clear();
  stream_ = other.stream_;
  copy_ = std::exchange(other.copy_, Transfer());
  site_ = other.site_;
  return *this;
}

GuardedMemory::~GuardedMemory() { Drop(); }

void GuardedMemory::Add(GuardedMemory other) {
  for (DeviceMemory& memory : other.memory_) memory_.push_back(std::move(memory));
  other.memory_.clear();
  if (other.copy_.ticket().value > copy_.ticket().value) copy_ = std::move(other.copy_);
}

void GuardedMemory::Drop() {
  if (memory_.empty()) return;
  const bool exiting = ProcessIsExiting();
  absl::Status waited = exiting ? absl::OkStatus() : copy_.WaitOn(stream_, *site_);
  // An error that passes costs time, not memory.
  if (!waited.ok()) waited = copy_.Wait(kHostWait);
  if (exiting || !waited.ok()) {
    uint64_t leaked_bytes = 0;
    for (DeviceMemory& memory : memory_) {
      leaked_bytes += memory.size_bytes();
      memory.Leak();
    }
    if (!exiting) {
      PINION_LOG(kError) << "leaking " << leaked_bytes
                         << " bytes of device memory: a copy may still touch them (" << waited
                         << ")";
    }
  }
  memory_.clear();
  copy_ = Transfer();
}

std::vector<GuardedMemory> MergeByStream(std::vector<GuardedMemory> memory) {
  std::vector<GuardedMemory> merged;
  for (GuardedMemory& next : memory) {
    if (!next) continue;
    if (!merged.empty() && merged.back().stream() == next.stream()) {
      merged.back().Add(std::move(next));
    } else {
      merged.push_back(std::move(next));
    }
  }
  return merged;
}

}  // namespace pinion
