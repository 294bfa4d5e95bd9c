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

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/heap/segment.h"

namespace pinion::internal {

class DeferredReleases {
 public:
  using Timelines = absl::InlinedVector<std::shared_ptr<FenceTimeline>, 4>;

  // `block` waits for `value` on `timeline`, and for whatever it was added with before.
  void Add(BlockRecord* block, const std::shared_ptr<FenceTimeline>& timeline, uint64_t value);

  // The blocks whose tickets are all done, into `done`.
  void TakeDone(std::vector<BlockRecord*>* done, Timelines* retired);

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

  Queue& QueueOf(const std::shared_ptr<FenceTimeline>& timeline);

  std::vector<Queue> queues_;  // none is empty
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_DEFERRED_RELEASES_H_
