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
  if (!memory_.empty()) Drop();
  memory_ = std::move(other.memory_);
  other.memory_.clear();
  stream_ = other.stream_;
  copy_ = std::move(other.copy_);
  site_ = other.site_;
  return *this;
}

void GuardedMemory::Add(GuardedMemory other) {
  for (DeviceMemory& memory : other.memory_) memory_.push_back(std::move(memory));
  other.memory_.clear();
  if (other.copy_.ticket().value > copy_.ticket().value) copy_ = std::move(other.copy_);
}

void GuardedMemory::Drop() {
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

void AddByStream(GuardedMemory memory, GuardedMemories& all) {
  if (!memory) return;
  if (!all.empty() && all.back().stream() == memory.stream()) {
    all.back().Add(std::move(memory));
  } else {
    all.push_back(std::move(memory));
  }
}

}  // namespace pinion
