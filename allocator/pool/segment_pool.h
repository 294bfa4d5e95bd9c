// What blocks belong to: the segments, the books of who has what of them, and the lock around
// those. Grower decides when to add a segment.
//
//   TryAllocate --> live block --Release---------------------------------------> free
//                        \_______ReleaseAfter--> buffer --> deferred --reclaim--^
//
// A release does not wait for those who allocate: one with a ticket, or one that meets the lock
// held, goes to a buffer (release_buffers.h); only one with several open tickets takes the lock.
// TryAllocate enters what its own thread released, some of what others handed over, and all there
// is before it says that nothing fits. To reclaim deferred blocks loads their timelines' counters
// and is done in passing; PollDeferred and TakeDeferred ask the devices first.
//
// Thread safety: thread-safe. No call to the source but JoinsAt, and none to a timeline but
// Completed(), is made while the lock is held.
// Ownership: shared by the allocator and, as one reference, all live blocks. The last one to go
// waits for a bounded time for tickets and gives the segments back; a segment whose tickets are
// not done by then is leaked, since a device may still be writing to it.

#ifndef PINION_ALLOCATOR_POOL_SEGMENT_POOL_H_
#define PINION_ALLOCATOR_POOL_SEGMENT_POOL_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/fork_origin.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/heap/segment.h"
#include "pinion/allocator/heap/segment_heap.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pool/deferred_releases.h"
#include "pinion/allocator/pool/limited_source.h"
#include "pinion/allocator/pool/pool_books.h"
#include "pinion/allocator/pool/release_buffers.h"

namespace pinion::internal {

class SegmentPool : public std::enable_shared_from_this<SegmentPool> {
 public:
  // Limit, alignment (at most the source's granularity) and segment size are the options'.
  SegmentPool(std::shared_ptr<HostMemorySource> source, const AllocatorOptions& options);
  ~SegmentPool();
  SegmentPool(const SegmentPool&) = delete;
  SegmentPool& operator=(const SegmentPool&) = delete;

  LimitedSource& source() { return source_; }
  bool pinned() const { return source_.pinned(); }
  uint64_t segment_bytes() const { return segment_bytes_; }

  // The least segment that has room for a request; 0 < size_bytes <= kMaxBlockBytes.
  uint64_t LeastSegmentBytes(uint64_t size_bytes) const;

  // --- Blocks ---

  // A live block from what is free; null if nothing fits. `way` is for the statistics.
  BlockRecord* TryAllocate(uint64_t size_bytes, PoolBooks::Way way = PoolBooks::Way::kCached);

  // `id` is the one that the record had when it was handed out. Dies if that was released already.
  // In a child of fork() they do nothing: the memory may not be there, and the lock be taken.
  void Release(BlockRecord* block, uint64_t id);
  void ReleaseAfter(BlockRecord* block, uint64_t id, absl::Span<const FenceTicket> tickets);

  // Asks the devices how far the timelines that blocks wait for have come. False if no block waits
  // for one any more; what came free before that is for TryAllocate to find, either way.
  bool PollDeferred();

  // A block that was released and whose tickets are done, or get done within `longest_wait`. Null
  // if none fits.
  BlockRecord* TakeDeferred(uint64_t size_bytes, absl::Duration longest_wait);

  // --- Segments ---

  // Adds a segment of source(), and takes a block of `size_bytes` at once, before anyone else can;
  // 0: none.
  BlockRecord* AddSegment(const HostSegment& segment, uint64_t size_bytes);

  // Gives wholly free segments back to source().
  LimitedSource::GivenBack GiveBack(const SegmentHeap::Removal& wanted);

  // Free bytes that can serve blocks that are not small.
  uint64_t RoomForLargeBlocks();
  uint64_t locked_bytes() const;

  AllocatorStats GetStats();

  // The allocator goes: gives back what is free, and lives on only as long as blocks do.
  static void Abandon(std::shared_ptr<SegmentPool> pool);

 private:
  // What is let go of while the lock is held, and destroyed after that.
  struct Leftovers {
    DeferredReleases::Timelines timelines;
    std::shared_ptr<SegmentPool> last;  // the live blocks' reference, once there are none
  };

  uint64_t BookedBytes(uint64_t size_bytes) const;
  void MarkReleased(BlockRecord* block, uint64_t id);
  // Waits until something fits, nothing is deferred any more, or `timeout` has passed. Null unless
  // something fits.
  BlockRecord* WaitForDeferred(uint64_t size_bytes, absl::Duration timeout);
  // Why some are left, if any are.
  absl::Status WaitForAllDeferred(absl::Duration timeout);
  // Reclaims, and returns what the rest waits for next: one ticket per timeline.
  std::vector<FenceTicket> ReclaimAndListTickets();
  // Through this thread's buffer. The pool may be gone afterwards.
  void ReleaseLater(const ReleaseBatch::Release& release,
                    const std::shared_ptr<FenceTimeline>& timeline);
  // Into the books. `completed` is of the timeline.
  void EnterLocked(const ReleaseBatch::Release& release,
                   const std::shared_ptr<FenceTimeline>& timeline, uint64_t completed,
                   std::shared_ptr<SegmentPool>* last) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Enters up to `most` of the releases that were handed over.
  void SettleLocked(uint64_t most, Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Enters all releases that happened before.
  void SettleAllLocked(Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ReclaimLocked(Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const ForkOrigin origin_;
  const uint64_t alignment_bytes_;
  const uint64_t segment_bytes_;
  LimitedSource source_;
  ReleaseBuffers buffers_;

  mutable Mutex mu_;
  PoolBooks books_ ABSL_GUARDED_BY(mu_);
  ReleaseBuffers::Batches incoming_ ABSL_GUARDED_BY(mu_);  // handed over, to be entered
  uint32_t until_reclaim_ ABSL_GUARDED_BY(mu_){};          // calls of TryAllocate
  uint32_t until_look_around_ ABSL_GUARDED_BY(mu_){};      // calls of ReclaimLocked
  // The live blocks' reference to the pool, once the allocator has gone.
  std::shared_ptr<SegmentPool> kept_by_blocks_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_SEGMENT_POOL_H_
