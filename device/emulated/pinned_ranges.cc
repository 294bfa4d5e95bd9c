#include "pinion/device/emulated/pinned_ranges.h"

#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"

namespace pinion {

void PinnedRanges::Add(void* data, uint64_t size_bytes) {
  ranges_[reinterpret_cast<uintptr_t>(data)] = size_bytes;
  simulation_->AddMemory(data, size_bytes, Simulation::kHost, "the pinning");
}

absl::Status PinnedRanges::Remove(void* data) {
  for (int slot = 0; slot < simulation_->time().stream_count(); ++slot) {
    const StreamPoint tail = simulation_->time().Tail(slot);
    PINION_RETURN_IF_ERROR(simulation_->BlockUntil(tail));
    PINION_CHECK(simulation_->Force(tail));
  }
  simulation_->RemoveMemory(data, Simulation::kHost, {}, "the unpinning");
  ranges_.erase(reinterpret_cast<uintptr_t>(data));
  return absl::OkStatus();
}

uint64_t PinnedRanges::SizeAt(const void* data) const {
  const auto it = ranges_.find(reinterpret_cast<uintptr_t>(data));
  return it == ranges_.end() ? 0 : it->second;
}

PinnedRanges::Overlap PinnedRanges::Find(const void* data, uint64_t size_bytes) const {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t end = begin + size_bytes;
  auto it = ranges_.lower_bound(end);
  if (it == ranges_.begin()) return Overlap::kNone;
  --it;
  const uintptr_t range_end = it->first + it->second;
  if (begin >= range_end) return Overlap::kNone;
  return begin >= it->first && end <= range_end ? Overlap::kInside : Overlap::kPartly;
}

}  // namespace pinion
