// Locks all arenas of a pool in turn, at the cost of one barrier.
//
//   const ArenaRound round(arenas_);
//   for (const ArenaRound::Seat& seat : round.seats()) seat.arena->FreeEnds(seat.by);
//
// The arenas' owners run on meanwhile, a little slower.
//
// Thread safety: for the thread that made it.

#ifndef PINION_ALLOCATOR_POOL_ARENA_ROUND_H_
#define PINION_ALLOCATOR_POOL_ARENA_ROUND_H_

#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/thread_slot.h"
#include "pinion/allocator/heap/segment_heap.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pool/arena.h"

namespace pinion::internal {

class ArenaRound {
 public:
  // An arena, and the role in which this thread takes its lock.
  struct Seat {
    Arena* arena = nullptr;
    Arena::By by = Arena::By::kOther;
  };

  // Covers those of `arenas` that are not null.
  explicit ArenaRound(absl::Span<const std::atomic<Arena*>> arenas);
  ~ArenaRound();
  ArenaRound(const ArenaRound&) = delete;
  ArenaRound& operator=(const ArenaRound&) = delete;

  absl::Span<const Seat> seats() const { return seats_; }

  // Returns the free bytes for blocks that are not small.
  uint64_t RoomForLargeBlocks(Arena::Leftovers* leftovers) const;

  // A part of a hole, and its arena.
  struct Part {
    HostSegment hole;
    Seat seat;
  };
  // Returns the parts, by address, of the smallest hole of at least `least_bytes` that touches an
  // end of an arena's memory. Such a hole may span several arenas. Returns nothing if there is
  // none.
  std::vector<Part> FindHole(uint64_t least_bytes, SegmentHeap::BorderAt border_at) const;

 private:
  absl::InlinedVector<Seat, kThreadSlots + 1> seats_;
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_ARENA_ROUND_H_
