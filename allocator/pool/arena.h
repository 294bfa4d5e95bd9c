// A part of a pool's memory that one thread allocates from: its books, the releases that wait to be
// entered in them, and a lock that costs that thread next to nothing.
//
//   TryAllocate --> live block --Enter-------------------------------------> free
//                        \______EnterLater--> buffer --> deferred --reclaim--^
//
// A release does not wait for the thread that allocates: one by another thread, or with a ticket,
// goes to a buffer (release_buffers.h). TryAllocate enters what its own thread released, some of
// what others handed over, and all there is before it says that nothing fits. To reclaim deferred
// blocks loads their timelines' counters and is done in passing.
//
// Free memory may be given up to another arena, in pieces; a block stays with its arena.
//
// Thread safety: thread-safe. `by` is kOwner on the one thread that the arena is for. Of a source
// JoinsAt is called with the lock held, and of a timeline Completed().
// Ownership: of books and records, not of memory.

#ifndef PINION_ALLOCATOR_POOL_ARENA_H_
#define PINION_ALLOCATOR_POOL_ARENA_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/types/span.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/biased_mutex.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/heap/segment.h"
#include "pinion/allocator/heap/segment_heap.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pool/deferred_releases.h"
#include "pinion/allocator/pool/pool_books.h"
#include "pinion/allocator/pool/release_buffers.h"

namespace pinion::internal {

class SegmentPool;

class Arena {
 public:
  using By = BiasedMutex::By;

  // A request, and what it is rounded to.
  struct Request {
    uint64_t size_bytes = 0;
    uint64_t class_bytes = 0;
    PoolBooks::Way way = PoolBooks::Way::kCached;
  };

  // What is let go of while a lock is held, for whoever holds no lock any more.
  struct Leftovers {
    DeferredReleases::Timelines timelines;
    uint64_t gone_blocks = 0;  // live blocks that were released after Close
  };

  // Of `pool`. Without an owner, `by` is always kOther.
  Arena(const SegmentPool* pool, const AllocatorOptions& options, bool has_owner);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  const SegmentPool* pool() const { return pool_; }

  // --- Blocks ---

  // A live block from what is free; null if nothing fits.
  BlockRecord* TryAllocate(By by, const Request& request, Leftovers* leftovers);

  // Hardened builds: dies if the block is not live.
  void MarkReleased(By by, BlockRecord* block, uint64_t id);

  // A live block becomes free, or waits for tickets that are not done.
  void Enter(By by, BlockRecord* block, uint64_t id, absl::Span<const FenceTicket* const> open,
             Leftovers* leftovers);
  // The same with at most one ticket (a null timeline: none), through this thread's buffer. False
  // after Close: then nothing has happened.
  bool EnterLater(const ReleaseBatch::Release& release,
                  const std::shared_ptr<FenceTimeline>& timeline) {
    return buffers_.Add(release, timeline);
  }

  // Reclaims, and returns what the rest waits for next: one ticket per timeline.
  std::vector<FenceTicket> ReclaimAndListTickets(By by, Leftovers* leftovers);
  void CountWait(By by);

  // --- Memory ---

  // Gives up free pieces of at least `least_bytes` in all, and of about `share` of what is free for
  // large blocks; none where that is less.
  std::vector<HostSegment> GiveUp(By by, uint64_t least_bytes, double share, Leftovers* leftovers);
  // Takes pieces over, and then a block; null if nothing fits or the request is for 0 bytes.
  BlockRecord* TakeOver(By by, absl::Span<const HostSegment> pieces, SegmentHeap::JoinsAt joins_at,
                        const Request& request);

  // Free bytes that can serve blocks that are not small.
  uint64_t RoomForLargeBlocks(By by, Leftovers* leftovers);
  // As those of PoolBooks.
  AllocatorStats Stats(By by, Leftovers* leftovers);

  // Enters every release, and each later one at once. Returns the number of live blocks.
  uint64_t Close(By by, Leftovers* leftovers);

 private:
  // Into the books. `completed` is of the timeline.
  void EnterLocked(const ReleaseBatch::Release& release,
                   const std::shared_ptr<FenceTimeline>& timeline, uint64_t completed,
                   Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Enters the next one of a batch.
  void EnterNextLocked(ReleaseBatch& batch, Leftovers* leftovers)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Lets go of the oldest batch, all of which was entered.
  void DropOldestLocked(Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Enters all of this thread's own releases, and some of those that others handed over and whose
  // tickets are done: a block that waits in its batch costs less than one that is deferred.
  void SettleSomeLocked(Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Enters all that there is in `incoming_`.
  void SettleIncomingLocked(Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Enters all releases that happened before.
  void SettleAllLocked(Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ReclaimLocked(Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const SegmentPool* const pool_;
  ReleaseBuffers buffers_;

  // The owner's lines, which nobody else reads where each thread keeps to itself.
  alignas(128) BiasedMutex mu_;
  PoolBooks books_ ABSL_GUARDED_BY(mu_);
  ReleaseBuffers::Batches incoming_ ABSL_GUARDED_BY(mu_);  // handed over, the oldest in front
  uint32_t until_reclaim_ ABSL_GUARDED_BY(mu_){};          // calls of TryAllocate
  uint32_t until_look_around_ ABSL_GUARDED_BY(mu_){};      // calls of ReclaimLocked
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_ARENA_H_
