// A part of a pool's memory that one thread allocates from: its books, the releases that wait to be
// entered in them, and a lock that costs that thread next to nothing.
//
//   TryAllocate --> live block --Enter-------------------------------------> free
//                        \______EnterLater--> buffer --> deferred --reclaim--^
//
// A release does not wait for the thread that allocates: one by another thread, or with a ticket,
// goes to a buffer (release_buffers.h). (One with several open tickets takes the arena's lock.)
// TryAllocate enters what its own thread released, some of what others handed over, and all there
// is before it says that nothing fits. To reclaim deferred blocks loads their timelines' counters
// and is done in passing.
//
// Free memory may be given up to another arena, in pieces; a block stays with its arena.
//
// Thread safety: thread-safe. `by` is RoleOfThisThread(). Of a source
// JoinsAt is called with the lock held, and of a timeline Completed().
// Ownership: of books and records, not of memory.

#ifndef PINION_ALLOCATOR_POOL_ARENA_H_
#define PINION_ALLOCATOR_POOL_ARENA_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/attributes.h"
#include "absl/base/thread_annotations.h"
#include "absl/types/span.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/biased_mutex.h"
#include "pinion/allocator/base/thread_slot.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/heap/segment.h"
#include "pinion/allocator/heap/segment_heap.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pool/countdowns.h"
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
    BatchQueue batches;        // whose timelines they hold
    uint64_t gone_blocks = 0;  // live blocks that were released after Close
    bool look_at_all = false;  // this arena has seen many allocations: the others may see none
  };

  // Of `pool`, for the thread that has this number; kNoThreadSlot: it has no owner.
  Arena(SegmentPool* pool, const AllocatorOptions& options, int thread_slot);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  SegmentPool* pool() const { return pool_; }

  // As whom this thread takes the lock.
  By RoleOfThisThread() const {
    return internal::thread_slot == owner_slot_ ? By::kOwner : By::kOther;
  }

  // Before and after this thread takes the lock as kAnnounced (biased_mutex.h).
  void Announce() { mu_.Announce(); }
  void Renounce() { mu_.Renounce(); }

  // --- Blocks ---

  // A live block from what is free; null if nothing fits.
  BlockRecord* TryAllocate(By by, const Request& request, Leftovers* leftovers);
  // The same for the owner, where nothing else is due: null also if some release is to be entered,
  // or tickets to be looked at.
  BlockRecord* TryAllocateAtOnce(uint64_t size_bytes, uint64_t class_bytes);

  // Hardened builds: dies if the block is not live.
  void MarkReleased(By by, BlockRecord* block, uint64_t id);

  // A live block becomes free, or waits for tickets: all that there are, done or not. False where
  // the C++ heap has no memory to note those: then nothing has happened.
  bool Enter(By by, BlockRecord* block, uint64_t id, absl::Span<const FenceTicket> tickets,
             Leftovers* leftovers);
  // The same without a ticket, for the owner. False after Close: then nothing has happened.
  bool EnterAtOnce(BlockRecord* block, uint64_t id);
  // The same with at most one ticket (a null timeline: none), through this thread's buffer. False
  // after Close, and where the C++ heap has no memory for it: then nothing has happened.
  bool EnterLater(By by, const ReleaseBatch::Release& release,
                  const std::shared_ptr<FenceTimeline>& timeline) {
    // Not behind Add: the block is then anybody's to enter, and with the last one the pool goes.
    if (by == By::kOwner) mine_wait_ = true;
    return buffers_.Add(release, timeline);
  }

  // Reclaims, and returns what the rest waits for next: one ticket per timeline.
  std::vector<FenceTicket> ReclaimAndListTickets(By by, Leftovers* leftovers);
  void CountWait(By by);

  // --- Memory ---
  //
  // What takes memory out of the arena, or in, is noexcept: of what is half moved nobody could tell
  // where it belongs.

  // Gives up all pieces that are wholly free.
  std::vector<HostSegment> GiveUp(By by, Leftovers* leftovers) noexcept;
  // How much an arena gives up to one that misses a block of `least_bytes`.
  struct Share {
    uint64_t least_bytes = 0;
    uint64_t most_bytes = 0;   // but for the least
    uint64_t piece_bytes = 0;  // what pieces have that are not cut, nor the last of a segment
  };
  // Gives wholly free pieces up until they are about a half of what is free for large blocks, or as
  // many as `share` says. None where less is free, and none of a hole that is shorter than a piece.
  std::vector<HostSegment> GiveUpShare(By by, const Share& share, Leftovers* leftovers) noexcept;
  uint64_t MemoryBytes(By by);
  // As those of SegmentHeap.
  std::vector<HostSegment> FreeEnds(By by);
  std::vector<HostSegment> GiveUpFreeEnd(By by, const HostSegment& range) noexcept;
  // Takes pieces over, and then a block; null if nothing fits or the request is for 0 bytes.
  BlockRecord* TakeOver(By by, absl::Span<const HostSegment> pieces,
                        SegmentHeap::BorderAt border_at, const Request& request) noexcept;

  // Free bytes that can serve blocks that are not small.
  uint64_t RoomForLargeBlocks(By by, Leftovers* leftovers);
  // As those of PoolBooks.
  AllocatorStats Stats(By by, Leftovers* leftovers);

  // Enters every release, and each later one at once. Returns the number of live blocks. What could
  // not be noted counts as live, until the pool looks at it again.
  uint64_t Close(By by, Leftovers* leftovers);

 private:
  // Into the books. `completed` is of the timeline. False as PoolBooks::Enter.
  bool EnterLocked(const ReleaseBatch::Release& release,
                   const std::shared_ptr<FenceTimeline>& timeline, uint64_t completed,
                   Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Enters the next one of a batch. False as above: it waits in the batch then.
  bool EnterNextLocked(ReleaseBatch& batch, Leftovers* leftovers)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Lets go of the oldest batch, all of which was entered.
  void DropOldestLocked(Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Enters all of this thread's own releases, and some of those that others handed over and whose
  // tickets are done: a block that waits in its batch costs less than one that is deferred.
  void SettleSomeLocked(Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Whether nothing of `incoming_`, which is not empty, is to be entered now.
  bool OldestMayWaitLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Enters all that there is in `incoming_`; but a batch waits there from the first release on that
  // there is no memory to note.
  void SettleIncomingLocked(Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Enters all releases that happened before.
  void SettleAllLocked(Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Takes in what threads have that released little, and sees to it that nothing waits long behind
  // the oldest batch.
  void LookAroundLocked(Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ReclaimLocked(Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // In a line that nobody writes to.
  SegmentPool* const pool_;
  const int owner_slot_;
  ReleaseBuffers buffers_;

  // The owner's lines, which nobody else reads where each thread keeps to itself.
  alignas(128) BiasedMutex mu_;
  bool mine_wait_ = false;  // releases in the owner's buffer; the owner's thread alone knows of it
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  Countdowns left_ ABSL_GUARDED_BY(mu_);
  BatchQueue incoming_ ABSL_GUARDED_BY(mu_);  // handed over, the oldest in front
  PoolBooks books_ ABSL_GUARDED_BY(mu_);
};

// --- What every allocation and release does, in line ---

ABSL_ATTRIBUTE_ALWAYS_INLINE inline BlockRecord* Arena::TryAllocateAtOnce(uint64_t size_bytes,
                                                                          uint64_t class_bytes) {
  OwnerLock lock(mu_);
  if (!left_.HasAtOnce() || mine_wait_ || buffers_.SomeIncoming()) [[unlikely]]
    return nullptr;
  left_.CountAtOnce();
  return books_.Take(size_bytes, class_bytes, PoolBooks::Way::kCached);
}

ABSL_ATTRIBUTE_ALWAYS_INLINE inline bool Arena::EnterAtOnce(BlockRecord* block, uint64_t id) {
  OwnerLock lock(mu_);
  if (closed_) [[unlikely]]
    return false;
  books_.Enter(block, id);
  return true;
}

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_ARENA_H_
