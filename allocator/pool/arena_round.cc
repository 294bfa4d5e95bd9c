#include "pinion/allocator/pool/arena_round.h"

#include <algorithm>
#include <cstddef>
#include <functional>

#include "pinion/allocator/base/biased_mutex.h"

namespace pinion::internal {

ArenaRound::ArenaRound(absl::Span<const std::atomic<Arena*>> arenas) {
  bool some_announced = false;
  for (const std::atomic<Arena*>& slot : arenas) {
    Arena* const arena = slot.load(std::memory_order_acquire);
    if (arena == nullptr) continue;
    Arena::By by = arena->RoleOfThisThread();
    if (by == Arena::By::kOther) {
      arena->Announce();
      by = Arena::By::kAnnounced;
      some_announced = true;
    }
    seats_.push_back({arena, by});
  }
  if (some_announced) BiasedMutex::RunBarrier();
}

ArenaRound::~ArenaRound() {
  for (const Seat& seat : seats_) {
    if (seat.by == Arena::By::kAnnounced) seat.arena->Renounce();
  }
}

uint64_t ArenaRound::RoomForLargeBlocks(Arena::Leftovers* leftovers) const {
  uint64_t bytes = 0;
  for (const Seat& seat : seats_) bytes += seat.arena->RoomForLargeBlocks(seat.by, leftovers);
  return bytes;
}

std::vector<ArenaRound::Part> ArenaRound::FindHole(uint64_t least_bytes,
                                                   SegmentHeap::BorderAt border_at) const {
  std::vector<Part> parts;
  for (const Seat& seat : seats_) {
    for (const HostSegment& hole : seat.arena->FreeEnds(seat.by)) parts.push_back({hole, seat});
  }
  std::sort(parts.begin(), parts.end(),
            [](const Part& a, const Part& b) { return std::less<>()(a.hole.data, b.hole.data); });
  absl::Span<const Part> best;
  uint64_t best_bytes = UINT64_MAX;
  for (size_t first = 0, next; first < parts.size(); first = next) {
    const HostSegment& start = parts[first].hole;
    uint64_t bytes = start.size_bytes;
    for (next = first + 1; next < parts.size(); ++next) {
      const HostSegment& hole = parts[next].hole;
      const bool goes_on = static_cast<char*>(start.data) + bytes == hole.data &&
                           start.numa_node == hole.numa_node &&
                           border_at(hole.data) != SegmentHeap::Border::kCloses;
      if (!goes_on) break;
      bytes += hole.size_bytes;
    }
    if (bytes < least_bytes || bytes >= best_bytes) continue;
    best = absl::MakeConstSpan(parts).subspan(first, next - first);
    best_bytes = bytes;
  }
  return {best.begin(), best.end()};
}

}  // namespace pinion::internal
