// Blocks that were released and wait for tickets: one heap per timeline, ordered by ticket value.
//
//   timeline A (completed 7)   8: block  |  9: block  |  9: block
//   timeline B (stuck at 2)    3: block
//
// A block that waits for several timelines is in the heap of each. Only the heads are compared, so
// looking costs one atomic load per timeline, reclaiming is proportional to what is reclaimed, and
// a stuck timeline holds back nothing but its own blocks.
//
// Thread safety: none of its own. It calls FenceTimeline::Completed only.
// Ownership: shares each timeline for as long as a block waits for it. To let go of the last
// reference may destroy a device's stream, so whoever holds a lock takes the references over
// (`retired`) and drops them later.

#ifndef PINION_ALLOCATOR_POOL_DEFERRED_RELEASES_H_
#define PINION_ALLOCATOR_POOL_DEFERRED_RELEASES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/heap/segment.h"

namespace pinion::internal {

class DeferredReleases {
 public:
  using Timelines = absl::InlinedVector<std::shared_ptr<FenceTimeline>, 4>;

  // Room for `count` more blocks that wait for `timeline`, so that Add needs no memory. False where
  // the C++ heap has none.
  bool MakeRoom(const std::shared_ptr<FenceTimeline>& timeline, size_t count);

  // `block` waits for `value` on `timeline`, and for whatever it was added with before. MakeRoom
  // was called before.
  void Add(BlockRecord* block, const std::shared_ptr<FenceTimeline>& timeline, uint64_t value);

  // Calls `done` with each block whose tickets are all done.
  void TakeDone(absl::FunctionRef<void(BlockRecord*)> done, Timelines* retired);

  // What is waited for next on each timeline.
  std::vector<FenceTicket> NextTickets() const;

 private:
  struct Entry {
    uint64_t value = 0;
    BlockRecord* block = nullptr;
  };
  struct Queue {
    std::shared_ptr<FenceTimeline> timeline;
    std::vector<Entry> heap;  // the smallest value in front
  };

  Queue* QueueOf(const std::shared_ptr<FenceTimeline>& timeline);  // null if there is none

  // One is empty where the room that was made in it was not needed, until TakeDone.
  std::vector<Queue> queues_;
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_DEFERRED_RELEASES_H_
