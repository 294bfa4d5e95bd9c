// What blocks belong to: the segments, the blocks that wait for tickets, the statistics, and the
// lock around them. PinnedAllocator decides when to grow; this keeps the books.
//
//   TryAllocate --> live block --Release---------------------------> free
//                        \_______ReleaseAfter--> deferred --reclaim--^
//
// Deferred blocks are reclaimed by TryAllocate (which only loads counters) and after PollDeferred
// or WaitForDeferred (which ask the device).
//
// Thread safety: thread-safe. No call to the source, and none to a timeline but Completed(), is
// made while the lock is held.
// Ownership: shared by the allocator and, as one reference, all live blocks. The last one to go
// waits for a bounded time for tickets and gives the segments back; a segment whose tickets are
// not done by then is leaked, since a device may still be writing to it.

#ifndef PINION_ALLOCATOR_SEGMENT_POOL_H_
#define PINION_ALLOCATOR_SEGMENT_POOL_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/deferred_releases.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/segment.h"
#include "pinion/allocator/segment_heap.h"
#include "pinion/allocator/size_class.h"

namespace pinion::internal {

class SegmentPool : public std::enable_shared_from_this<SegmentPool> {
 public:
  // `pinned`: whether the source's memory is. `alignment_bytes` is of blocks that are not small.
  SegmentPool(std::shared_ptr<HostMemorySource> source, bool pinned, uint64_t max_locked_bytes,
              uint64_t alignment_bytes);
  ~SegmentPool();
  SegmentPool(const SegmentPool&) = delete;
  SegmentPool& operator=(const SegmentPool&) = delete;

  HostMemorySource& source() const { return *source_; }
  bool pinned() const { return pinned_; }

  // The bytes that are booked for a request; 0 < size_bytes <= kMaxBlockBytes.
  uint64_t BookedBytes(uint64_t size_bytes) const;

  // --- Blocks ---

  // A live block from what is free; null if nothing fits.
  BlockRecord* TryAllocate(uint64_t size_bytes);

  // `id` is the one that the record had when it was handed out. Dies if that was released already.
  void Release(BlockRecord* block, uint64_t id);
  void ReleaseAfter(BlockRecord* block, uint64_t id, absl::Span<const FenceTicket> tickets);

  // Asks the devices how far the timelines that blocks wait for have come. False if none waits.
  bool PollDeferred();

  // Waits until something fits, nothing is deferred any more, or `deadline`. Null unless it fits.
  BlockRecord* WaitForDeferred(uint64_t size_bytes, absl::Time deadline);

  // --- Segments ---

  // Books `bytes` under the limit before they are asked of the source. ResourceExhausted if they
  // do not fit. Each success is followed by one FinishGrowth, or CancelGrowth.
  absl::Status BeginGrowth(uint64_t bytes);
  void CancelGrowth(uint64_t bytes);
  // Adds the segment, and takes a block of `size_bytes` at once, before anyone else can; 0: none.
  BlockRecord* FinishGrowth(const HostSegment& segment, bool small, uint64_t size_bytes);
  // How far the limit is from admitting `bytes`; 0 if it does.
  uint64_t BytesOverLimit(uint64_t bytes) const;

  // Gives wholly free segments back until they add up to `bytes`. Returns what was given back;
  // the source's error if it failed to free one (which is then lost).
  absl::StatusOr<uint64_t> GiveBack(uint64_t bytes, bool keep_small = false);

  // Free bytes that can serve blocks that are not small.
  uint64_t large_free_bytes() const;
  uint64_t locked_bytes() const;

  // --- Statistics ---

  AllocatorStats GetStats() const;
  void CountPinCall(bool ok, absl::Duration duration);
  // `counter` is a member that counts something: &AllocatorStats::failures.
  void Count(uint64_t AllocatorStats::*counter);

  // The allocator goes: gives back what is free, and lives on only as long as blocks do.
  static void Abandon(std::shared_ptr<SegmentPool> pool);

 private:
  using Timelines = DeferredReleases::Timelines;

  // What SizeBucketStats tells, of one doubling.
  struct Bucket {
    uint64_t allocations = 0;
    uint64_t misses = 0;
    ByteGauge booked_bytes;
  };

  BlockRecord* TakeLocked(uint64_t size_bytes, bool hit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Into the free bytes, from those of its state.
  void PutLocked(BlockRecord* block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ReclaimLocked(Timelines* retired) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CheckLiveLocked(const BlockRecord* block, uint64_t id) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Takes a block off the live ones. The last one's reference to the pool is returned, and dropped
  // by the caller once it has let go of the lock.
  std::shared_ptr<SegmentPool> EndLifeLocked(BlockRecord* block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Bucket& BucketLocked(const BlockRecord* block) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void UpdateCachedLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void WaitForAllDeferred(absl::Time deadline);

  const std::shared_ptr<HostMemorySource> source_;
  const bool pinned_;
  const uint64_t max_locked_bytes_;
  const uint64_t alignment_bytes_;

  mutable Mutex mu_;
  SegmentHeap heap_ ABSL_GUARDED_BY(mu_);
  DeferredReleases deferred_ ABSL_GUARDED_BY(mu_);
  AllocatorStats stats_ ABSL_GUARDED_BY(mu_);
  std::array<Bucket, kLevels> buckets_ ABSL_GUARDED_BY(mu_);
  // Being pinned or unpinned outside of the lock: locked for all the limit knows.
  uint64_t in_transit_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t live_blocks_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t next_id_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t end_of_ids_ ABSL_GUARDED_BY(mu_) = 0;
  // The live blocks' reference to the pool, once the allocator has gone.
  std::shared_ptr<SegmentPool> kept_by_blocks_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_SEGMENT_POOL_H_
