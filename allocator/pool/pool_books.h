// The books of an arena: what is free, which blocks are live or wait for tickets, and the
// statistics of that.
//
//   Take --> live block --Enter-------------------------> free
//                          \--> deferred --Reclaim--------^
//
// Thread safety: none of its own; Arena adds the lock. Of a source JoinsAt is called, and of
// a timeline Completed, which only compute.

#ifndef PINION_ALLOCATOR_POOL_POOL_BOOKS_H_
#define PINION_ALLOCATOR_POOL_POOL_BOOKS_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/heap/segment.h"
#include "pinion/allocator/heap/segment_heap.h"
#include "pinion/allocator/heap/size_class.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pool/deferred_releases.h"
#include "pinion/allocator/pool/release_buffers.h"

namespace pinion::internal {

class PoolBooks {
 public:
  // How an allocation came by its block.
  enum class Way { kCached, kPolled, kWaited, kGrown };

  // Those of one arena.
  PoolBooks(uint64_t alignment_bytes, uint64_t segment_bytes, Arena* arena);

  // A live block for a request of `size_bytes`; null if no free one has `class_bytes`.
  BlockRecord* Take(uint64_t size_bytes, uint64_t class_bytes, Way way);

  // Hardened builds: dies if the block is not live.
  void MarkReleased(BlockRecord* block, uint64_t id);

  // A live block becomes free, or waits for its ticket if `completed`, which is of its timeline, is
  // less. Dies if it is not live.
  void Enter(const ReleaseBatch::Release& release, const std::shared_ptr<FenceTimeline>& timeline,
             uint64_t completed);
  // The block waits for one more ticket.
  void Defer(BlockRecord* block, const std::shared_ptr<FenceTimeline>& timeline, uint64_t value);
  // Blocks whose tickets are done become free.
  void Reclaim(DeferredReleases::Timelines* retired);
  // What deferred blocks wait for next: one ticket per timeline.
  std::vector<FenceTicket> NextTickets() const { return deferred_.NextTickets(); }

  // Adds segments, and takes a block then as Take does; size 0: none.
  BlockRecord* AddSegments(absl::Span<const HostSegment> segments, SegmentHeap::JoinsAt joins_at,
                           uint64_t size_bytes, uint64_t class_bytes, Way way);
  std::vector<HostSegment> RemoveFreeSegments(uint64_t bytes) {
    return heap_.RemoveFreeSegments(bytes);
  }

  // Free bytes that can serve blocks that are not small.
  uint64_t RoomForLargeBlocks();
  uint64_t live_blocks() const { return live_blocks_; }

  void CountWait() { ++stats_.waits_for_deferred; }
  // Of these books: what is locked, and how often memory went back, is the pool's to add.
  AllocatorStats Stats() const;

 private:
  // What SizeBucketStats tells, of one doubling.
  struct Bucket {
    uint64_t allocations = 0;
    uint64_t misses = 0;
    ByteGauge booked_bytes;
  };

  Bucket& BucketOf(const BlockRecord& block);
  // Into the free bytes, from those in use.
  void Put(BlockRecord* block);
  uint64_t used_bytes() const { return booked_bytes_.current + deferred_bytes_.current; }
  uint64_t cached_bytes() const { return heap_.segment_bytes() - used_bytes(); }

  SegmentHeap heap_;
  DeferredReleases deferred_;
  std::vector<BlockRecord*> done_;  // of Reclaim

  // What each allocation counts; Stats() derives the rest.
  uint64_t allocations_ = 0;
  uint64_t live_blocks_ = 0;
  ByteGauge requested_bytes_;
  ByteGauge booked_bytes_;
  ByteGauge deferred_bytes_;
  uint64_t peak_used_bytes_ = 0;
  uint64_t peak_cached_bytes_ = 0;
  std::array<Bucket, kLevels> buckets_;

  uint64_t grown_bytes_ = 0;  // of blocks that were taken along with a new segment
  AllocatorStats stats_;      // what is counted seldom
  uint64_t next_id_ = 0;
  uint64_t end_of_ids_ = 0;
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_POOL_BOOKS_H_
