// All arenas of a pool, for one thread that looks at each: their locks cost it one barrier
// together.
//
//   const ArenaRound round(arenas_);
//   for (const ArenaRound::Seat& seat : round.seats()) seat.arena->FreeEnds(seat.by);
//
// The arenas' owners go on meanwhile, a little slower.
//
// Thread safety: of the thread that made it.

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
  // An arena, and as whom the thread takes its lock.
  struct Seat {
    Arena* arena = nullptr;
    Arena::By by = Arena::By::kOther;
  };

  // Those of `arenas` that are not null.
  explicit ArenaRound(absl::Span<const std::atomic<Arena*>> arenas);
  ~ArenaRound();
  ArenaRound(const ArenaRound&) = delete;
  ArenaRound& operator=(const ArenaRound&) = delete;

  absl::Span<const Seat> seats() const { return seats_; }

  // Free bytes that can serve blocks that are not small.
  uint64_t RoomForLargeBlocks(Arena::Leftovers* leftovers) const;

  // A part of a hole, and whose it is.
  struct Part {
    HostSegment hole;
    Seat seat;
  };
  // The parts, by address, of the smallest hole of at least `least_bytes` that reaches an end of an
  // arena's memory, where it may go on in another arena. Empty if there is none.
  std::vector<Part> FindHole(uint64_t least_bytes, SegmentHeap::BorderAt border_at) const;

 private:
  absl::InlinedVector<Seat, kThreadSlots + 1> seats_;
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_ARENA_ROUND_H_
