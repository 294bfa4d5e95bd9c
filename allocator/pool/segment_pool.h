// What blocks belong to: the segments, the blocks that wait for tickets, the statistics, and the
// lock around them. PinnedAllocator decides when to grow; this keeps the books.
//
//   TryAllocate --> live block --Release---------------------------------------> free
//                        \_______ReleaseAfter--> buffer --> deferred --reclaim--^
//
// A release does not wait for those who allocate: one with a ticket, or one that meets the lock
// held, goes to a buffer (release_buffers.h); only one with several open tickets takes the lock.
// TryAllocate enters what its own thread released, some of what others handed over, and all there
// is before it says that nothing fits. To reclaim deferred blocks loads their timelines' counters
// and is done in passing; PollDeferred and WaitForDeferred ask the devices first.
//
// Thread safety: thread-safe. No call to the source but JoinsAt, and none to a timeline but
// Completed(), is made while the lock is held.
// Ownership: shared by the allocator and, as one reference, all live blocks. The last one to go
// waits for a bounded time for tickets and gives the segments back; a segment whose tickets are
// not done by then is leaked, since a device may still be writing to it.

#ifndef PINION_ALLOCATOR_POOL_SEGMENT_POOL_H_
#define PINION_ALLOCATOR_POOL_SEGMENT_POOL_H_

#include <array>
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
#include "pinion/allocator/heap/size_class.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pool/deferred_releases.h"
#include "pinion/allocator/pool/release_buffers.h"
#include "pinion/allocator/pool/turn.h"

namespace pinion::internal {

class SegmentPool : public std::enable_shared_from_this<SegmentPool> {
 public:
  // `pinned`: whether the source's memory is. Limit, alignment (at most the source's granularity)
  // and segment size are the options'.
  SegmentPool(std::shared_ptr<HostMemorySource> source, bool pinned,
              const AllocatorOptions& options);
  ~SegmentPool();
  SegmentPool(const SegmentPool&) = delete;
  SegmentPool& operator=(const SegmentPool&) = delete;

  HostMemorySource& source() const { return *source_; }
  bool pinned() const { return pinned_; }
  uint64_t segment_bytes() const { return segment_bytes_; }

  // The least segment that has room for a request; 0 < size_bytes <= kMaxBlockBytes.
  uint64_t LeastSegmentBytes(uint64_t size_bytes) const;

  // --- Blocks ---

  // A live block from what is free; null if nothing fits.
  BlockRecord* TryAllocate(uint64_t size_bytes);

  // `id` is the one that the record had when it was handed out. Dies if that was released already.
  // In a child of fork() they do nothing: the memory may not be there, and the lock be taken.
  void Release(BlockRecord* block, uint64_t id);
  void ReleaseAfter(BlockRecord* block, uint64_t id, absl::Span<const FenceTicket> tickets);

  // Asks the devices how far the timelines that blocks wait for have come. False if no block waits
  // for one any more; what came free before that is for TryAllocate to find, either way.
  bool PollDeferred();

  // Waits until something fits, nothing is deferred any more, or `timeout` has passed. Null unless
  // something fits.
  BlockRecord* WaitForDeferred(uint64_t size_bytes, absl::Duration timeout);

  // --- Segments ---

  // Books `bytes` under the limit before they are asked of the source. ResourceExhausted if they
  // do not fit. Each success is followed by one FinishGrowth, or CancelGrowth.
  absl::Status BeginGrowth(uint64_t bytes);
  void CancelGrowth(uint64_t bytes);
  // Adds the segment, and takes a block of `size_bytes` at once, before anyone else can; 0: none.
  BlockRecord* FinishGrowth(const HostSegment& segment, uint64_t size_bytes);
  // What the limit still admits.
  uint64_t BytesToLimit() const;

  // One thread at a time asks the source: two that find nothing at once would both pin a whole
  // segment.
  Turn& growth_turn() { return growth_turn_; }

  // Gives wholly free segments back. What the source fails to free is lost, and logged.
  struct GivenBack {
    uint64_t bytes = 0;   // without what is lost
    absl::Status status;  // the first error
  };
  GivenBack GiveBack(const SegmentHeap::Removal& wanted);

  // Free bytes that can serve blocks that are not small.
  uint64_t RoomForLargeBlocks();
  uint64_t locked_bytes() const;

  // --- Statistics ---

  AllocatorStats GetStats();
  void CountPinCall(bool ok, absl::Duration duration);
  // `counter` is a member that counts something: &AllocatorStats::failures.
  void Count(uint64_t AllocatorStats::*counter);

  // The allocator goes: gives back what is free, and lives on only as long as blocks do.
  static void Abandon(std::shared_ptr<SegmentPool> pool);

 private:
  // What is let go of while the lock is held, and destroyed after that.
  struct Leftovers {
    DeferredReleases::Timelines timelines;
    std::shared_ptr<SegmentPool> last;  // the live blocks' reference, once there are none
  };

  // What SizeBucketStats tells, of one doubling.
  struct Bucket {
    uint64_t allocations = 0;
    uint64_t misses = 0;
    ByteGauge booked_bytes;
  };

  uint64_t BookedBytes(uint64_t size_bytes) const;
  // Hardened builds: dies if the block is not live.
  void MarkReleased(BlockRecord* block, uint64_t id);
  // Through this thread's buffer. The pool may be gone afterwards.
  void ReleaseLater(const ReleaseBatch::Release& release,
                    const std::shared_ptr<FenceTimeline>& timeline);
  // Enters all releases that happened before.
  void SettleAllLocked(Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Enters up to `most` of those that were handed over.
  void SettleLocked(uint64_t most, Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Into the books. `completed` is of the timeline.
  void EnterLocked(const ReleaseBatch::Release& release,
                   const std::shared_ptr<FenceTimeline>& timeline, uint64_t completed,
                   std::shared_ptr<SegmentPool>* last) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DeferLocked(BlockRecord* block, const std::shared_ptr<FenceTimeline>& timeline,
                   uint64_t value) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  BlockRecord* TakeLocked(uint64_t size_bytes, bool hit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Into the free bytes, from those of its state.
  void PutLocked(BlockRecord* block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ReclaimLocked(Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Takes a block off the live ones. Dies if it is none.
  void EndLifeLocked(BlockRecord* block, uint64_t id, std::shared_ptr<SegmentPool>* last)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Bucket& BucketLocked(const BlockRecord* block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void UpdateCachedLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Reclaims, and returns what the rest waits for next: one ticket per timeline.
  std::vector<FenceTicket> ReclaimAndListTickets();
  // Why some are left, if any are.
  absl::Status WaitForAllDeferred(absl::Duration timeout);

  const ForkOrigin origin_;
  const std::shared_ptr<HostMemorySource> source_;
  const bool pinned_;
  const uint64_t max_locked_bytes_;
  const uint64_t alignment_bytes_;
  const uint64_t segment_bytes_;
  Turn growth_turn_;
  ReleaseBuffers buffers_;

  mutable Mutex mu_;
  SegmentHeap heap_ ABSL_GUARDED_BY(mu_);
  DeferredReleases deferred_ ABSL_GUARDED_BY(mu_);
  ReleaseBuffers::Batches incoming_ ABSL_GUARDED_BY(mu_);  // handed over, to be entered
  uint32_t until_look_around_ ABSL_GUARDED_BY(mu_){};      // calls of ReclaimLocked
  std::vector<BlockRecord*> done_ ABSL_GUARDED_BY(mu_);    // of ReclaimLocked
  uint32_t until_reclaim_ ABSL_GUARDED_BY(mu_){};          // calls of TryAllocate
  AllocatorStats stats_ ABSL_GUARDED_BY(mu_);
  std::array<Bucket, kLevels> buckets_ ABSL_GUARDED_BY(mu_);
  // Being pinned or unpinned outside of the lock: locked for all the limit knows. With the heap's
  // segments never more than the limit.
  uint64_t in_transit_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t live_blocks_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t next_id_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t end_of_ids_ ABSL_GUARDED_BY(mu_) = 0;
  // The live blocks' reference to the pool, once the allocator has gone.
  std::shared_ptr<SegmentPool> kept_by_blocks_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_SEGMENT_POOL_H_
