// Released blocks that wait for tickets: one heap per timeline, ordered by ticket value.
//
//   timeline A (completed 7)   8: block  |  9: block  |  9: block
//   timeline B (stuck at 2)    3: block
//
// A block that waits for several timelines is in the heap of each. A reclaim loads one atomic
// counter per timeline and touches only the blocks that it frees. A stuck timeline holds back only
// its own blocks.
//
// Thread safety: none of its own. Calls FenceTimeline::Completed only. Ownership: shares each
// timeline while a block waits for it. Destroying the last reference may destroy a device's stream.
// So a caller with a lock receives the references in `retired`, and drops them after the unlock.

#ifndef PINION_ALLOCATOR_POOL_DEFERRED_RELEASES_H_
#define PINION_ALLOCATOR_POOL_DEFERRED_RELEASES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/heap/block_records.h"

namespace pinion::internal {

class DeferredReleases {
 public:
  using Timelines = absl::InlinedVector<std::shared_ptr<FenceTimeline>, 4>;

  // Makes room for `count` calls of Add with `timeline`, which then need no memory. Returns false
  // if the C++ heap is full.
  bool MakeRoom(const std::shared_ptr<FenceTimeline>& timeline, size_t count);

  // Makes `block` wait for `value` of `timeline`, in addition to its earlier tickets. Requires
  // MakeRoom.
  void Add(BlockRecord* block, const std::shared_ptr<FenceTimeline>& timeline, uint64_t value);

  // Calls `done` with each block whose tickets are all done.
  void TakeDone(absl::FunctionRef<void(BlockRecord*)> done, Timelines* retired);

  // Returns the next ticket of each timeline.
  std::vector<FenceTicket> NextTickets() const;

 private:
  struct Entry {
    uint64_t value = 0;
    BlockRecord* block = nullptr;
  };
  struct Queue {
    std::shared_ptr<FenceTimeline> timeline;
    std::vector<Entry> heap;  // the smallest value first
  };

  Queue* QueueOf(const std::shared_ptr<FenceTimeline>& timeline);  // null if there is none

  // A queue may be empty until TakeDone, if MakeRoom was not followed by Add.
  std::vector<Queue> queues_;
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_DEFERRED_RELEASES_H_
