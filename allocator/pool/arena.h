// The part of a pool's memory that one thread allocates from: its books, pending releases, and a
// lock that costs this thread next to nothing.
//
//   TryAllocate --> live block --Enter-------------------------------------> free
//                        \______EnterLater--> buffer --> deferred --reclaim--^
//
// A release by another thread or with a ticket goes to a buffer (release_buffers.h), so that it
// does not wait for the allocating thread. Exception: a release with several open tickets takes the
// arena's lock. TryAllocate enters its own thread's releases and some of other threads' releases.
// Before it returns null it enters all of them. In passing it reclaims deferred blocks whose
// tickets are done.
//
// Free memory may move to another arena, in pieces. A live block stays with its arena.
//
// Thread safety: thread-safe. `by` is RoleOfThisThread(). With the lock held, an arena calls
// JoinsAt of the source and Completed() of timelines, and nothing else. Ownership: owns books and
// records, but no memory.

#ifndef PINION_ALLOCATOR_POOL_ARENA_H_
#define PINION_ALLOCATOR_POOL_ARENA_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/attributes.h"
#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/types/span.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/biased_mutex.h"
#include "pinion/allocator/base/thread_slot.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/heap/block_records.h"
#include "pinion/allocator/heap/segment_heap.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pool/pool_books.h"
#include "pinion/allocator/pool/release_buffers.h"

namespace pinion::internal {

class SegmentPool;

// Counts down an arena's allocations until it reclaims blocks or looks around. The owner's fast
// path counts with one subtraction.
//
//   if (left.HasAtOnce()) left.Count();               // the fast path
//   else if (left.IsReclaimDue()) ...                 // Begin, look around if it says so, End
//   else left.Count();
//
// Thread safety: none; guarded by the arena's lock.
class Countdowns {
 public:
  // Returns whether an allocation may take the fast path.
  bool HasAtOnce() const { return until_look_around_ > at_once_down_to_; }
  // Lets all allocations until the next reclaim take the fast path.
  void MakeAllAtOnce() { at_once_down_to_ = reclaim_at_; }
  void MakeNoneAtOnce() { at_once_down_to_ = UINT32_MAX; }

  bool IsReclaimDue() const { return until_look_around_ == reclaim_at_; }
  void Count() { --until_look_around_; }
  // Makes a reclaim due within kReclaimEvery allocations.
  void ReclaimSoon() {
    MakeNoneAtOnce();
    reclaim_at_ =
        until_look_around_ - std::min(until_look_around_ - reclaim_at_, kReclaimEvery - 1);
  }

  // Begins a reclaim, due or not. Returns whether the arena must look around first.
  bool BeginReclaim() {
    MakeNoneAtOnce();
    if (until_look_around_ > 0) return false;
    until_look_around_ = kLookAroundEvery;
    return true;
  }
  // Call after looking around. Returns whether all arenas must be reclaimed too.
  bool OnLookAround() {
    const bool at_all = until_look_at_all_ == 0;
    until_look_at_all_ = at_all ? kLookAtAllEvery - 1 : until_look_at_all_ - 1;
    return at_all;
  }
  // Ends a reclaim, and counts the allocation. `some_wait` tells whether blocks still wait.
  void EndReclaim(bool some_wait) {
    reclaim_at_ = some_wait ? until_look_around_ - std::min(kReclaimEvery, until_look_around_) : 0;
    Count();
  }

 private:
  // Allocations between two reclaims while blocks wait. Each reads a counter that is in another
  // processor's cache.
  static constexpr uint32_t kReclaimEvery = 4;
  // Allocations between two looks into the buffers of all threads.
  static constexpr uint32_t kLookAroundEvery = 256;
  // Looks around until all arenas are reclaimed too.
  static constexpr uint32_t kLookAtAllEvery = 64;

  uint32_t until_look_around_ = 0;  // allocations
  // Values of until_look_around_.
  uint32_t reclaim_at_ = 0;
  uint32_t at_once_down_to_ = UINT32_MAX;
  uint32_t until_look_at_all_ = 0;  // in looks around
};

class Arena {
 public:
  using By = BiasedMutex::By;

  // A request, with its rounded size.
  struct Request {
    uint64_t size_bytes = 0;
    uint64_t class_bytes = 0;
  };

  // Objects to be destroyed when no lock is held.
  struct Leftovers {
    DeferredReleases::Timelines timelines;
    BatchQueue batches;        // with the timelines that they hold
    uint64_t gone_blocks = 0;  // live blocks that were released after Close
    bool look_at_all = false;  // all arenas are due for reclaiming: some may see no allocations
  };

  // `thread_slot` is the number of the owner thread, or kNoThreadSlot for none.
  Arena(SegmentPool* pool, const AllocatorOptions& options, int thread_slot);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  SegmentPool* pool() const { return pool_; }

  // Returns the role in which this thread takes the lock.
  By RoleOfThisThread() const {
    return internal::thread_slot == owner_slot_ ? By::kOwner : By::kOther;
  }

  // Call before and after this thread takes the lock as kAnnounced (biased_mutex.h).
  void Announce() { mu_.Announce(); }
  void Renounce() { mu_.Renounce(); }

  // --- Blocks ---

  // Returns a live block from free memory, or null if nothing fits.
  BlockRecord* TryAllocate(By by, const Request& request, Leftovers* leftovers);
  // The owner's fast path. Also returns null if a release must be entered or tickets must be
  // checked.
  BlockRecord* TryAllocateAtOnce(uint64_t size_bytes, uint64_t class_bytes);

  // In hardened builds, dies if the block is not live.
  void MarkReleased(By by, BlockRecord* block, uint64_t id);

  // Releases a live block: frees it, or defers it until `tickets` are done. `tickets` are all
  // tickets of the release. Returns false, and changes nothing, if the C++ heap has no memory for
  // the tickets.
  bool Enter(By by, BlockRecord* block, uint64_t id, absl::Span<const FenceTicket> tickets,
             Leftovers* leftovers);
  // The owner's fast path, without a ticket. Returns false, and changes nothing, after Close.
  bool EnterAtOnce(BlockRecord* block, uint64_t id);
  // Releases a block through this thread's buffer, with at most one ticket (none if `timeline` is
  // null). Returns false, and changes nothing, after Close or if the C++ heap is full.
  bool EnterLater(By by, const ReleaseBatch::Release& release,
                  const std::shared_ptr<FenceTimeline>& timeline) {
    // Set before Add: after that, any thread may enter the block, and the last one destroys the
    // pool.
    if (by == By::kOwner) mine_wait_ = true;
    return buffers_.Add(release, timeline);
  }

  // Reclaims blocks. Adds the tickets that the rest waits for to `next`.
  void Reclaim(By by, DeferredReleases::NextTickets* next, Leftovers* leftovers);

  // --- Memory ---
  //
  // Functions that move memory into or out of the arena are noexcept, because half-moved memory
  // would have no owner.

  // Removes all free pieces.
  std::vector<HostSegment> GiveUp(By by, Leftovers* leftovers) noexcept;
  // The memory that an arena gives to one that misses a block of `least_bytes`.
  struct Share {
    uint64_t least_bytes = 0;
    uint64_t most_bytes = 0;   // an upper bound, unless least_bytes is more
    uint64_t piece_bytes = 0;  // size of uncut pieces, except the last of a segment
  };
  // Removes free pieces: about half of the bytes that are free for large blocks, within the bounds
  // of `share`. Returns none if less than the least is free, or if no hole is as long as a piece.
  std::vector<HostSegment> GiveUpShare(By by, const Share& share, Leftovers* leftovers) noexcept;
  uint64_t MemoryBytes(By by);
  // Like the functions of SegmentHeap.
  std::vector<HostSegment> FreeEnds(By by);
  std::vector<HostSegment> GiveUpFreeEnd(By by, const HostSegment& range) noexcept;
  // Adds pieces, and takes a block for the request that made the pool grow. Returns null if nothing
  // fits or the request is for 0 bytes.
  BlockRecord* TakeOver(By by, absl::Span<const HostSegment> pieces,
                        SegmentHeap::BorderAt border_at, const Request& request) noexcept;

  // Returns the free bytes for blocks that are not small.
  uint64_t RoomForLargeBlocks(By by, Leftovers* leftovers);
  // Like PoolBooks::AddStats.
  void AddStats(By by, AllocatorStats* sum, Leftovers* leftovers);

  // Enters every release, and from here on each release at once. Returns the number of live blocks,
  // including releases that there was no memory to enter.
  uint64_t Close(By by, Leftovers* leftovers);

 private:
  // Enters a release in the books. `completed` belongs to `timeline`. Returns false like
  // PoolBooks::Enter.
  bool EnterLocked(const ReleaseBatch::Release& release,
                   const std::shared_ptr<FenceTimeline>& timeline, uint64_t completed,
                   Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Enters the next release of the oldest batch, and drops the batch after its last release. If it
  // returns false, the release stays in the batch.
  bool EnterNextLocked(Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Enters all of this thread's releases, and some of other threads' whose tickets are done. A
  // block that waits in its batch costs less than a deferred one.
  void SettleSomeLocked(Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Returns whether the oldest batch of `incoming_` may wait. `incoming_` must not be empty.
  bool OldestMayWaitLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Enters the releases of all batches. A batch is kept from the first release on that there is no
  // memory to enter.
  void SettleIncomingLocked(Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Enters all earlier releases of all threads.
  void SettleAllLocked(Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Collects releases from buffers that are rarely filled, and makes no batch wait long behind a
  // stuck one.
  void LookAroundLocked(Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void ReclaimLocked(Leftovers* leftovers) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // On a cache line that is never written to.
  SegmentPool* const pool_;
  const int owner_slot_;  // kNoThreadSlot, which no thread has, for none
  ReleaseBuffers buffers_;

  // The owner's cache lines. Other threads rarely read them.
  alignas(128) BiasedMutex mu_;
  bool mine_wait_ = false;  // the owner's buffer has releases; for the owner's thread alone
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
  Countdowns left_ ABSL_GUARDED_BY(mu_);
  BatchQueue incoming_ ABSL_GUARDED_BY(mu_);  // from other threads, oldest first
  PoolBooks books_ ABSL_GUARDED_BY(mu_);
};

// Locks all arenas of a pool in turn, at the cost of one barrier. Their owners run on meanwhile, a
// little slower.
//
//   const ArenaRound round(arenas_);
//   for (const ArenaRound::Seat& seat : round.seats()) seat.arena->FreeEnds(seat.by);
//
// Thread safety: for the thread that made it.
class ArenaRound {
 public:
  // An arena, and the role in which this thread takes its lock.
  struct Seat {
    Arena* arena = nullptr;
    Arena::By by = Arena::By::kOther;
  };

  // Covers those of `arenas` that are not null.
  explicit ArenaRound(absl::Span<const std::atomic<Arena*>> arenas);
  ~ArenaRound();
  ArenaRound(const ArenaRound&) = delete;
  ArenaRound& operator=(const ArenaRound&) = delete;

  absl::Span<const Seat> seats() const { return seats_; }

  // A part of a hole, and its arena.
  struct Part {
    HostSegment hole;
    Seat seat;
  };
  // Returns the parts, by address, of the smallest hole of at least `least_bytes` that touches an
  // end of an arena's memory. Such a hole may span several arenas. Returns nothing if there is
  // none.
  std::vector<Part> FindHole(uint64_t least_bytes, SegmentHeap::BorderAt border_at) const;

 private:
  absl::InlinedVector<Seat, kThreadSlots + 1> seats_;
};

// --- What every allocation and release does, in line ---

ABSL_ATTRIBUTE_ALWAYS_INLINE inline BlockRecord* Arena::TryAllocateAtOnce(uint64_t size_bytes,
                                                                          uint64_t class_bytes) {
  BiasedLock lock(mu_, By::kOwner);
  if (!left_.HasAtOnce() || mine_wait_ || buffers_.SomeIncoming()) [[unlikely]]
    return nullptr;
  left_.Count();
  return books_.Take(size_bytes, class_bytes);
}

ABSL_ATTRIBUTE_ALWAYS_INLINE inline bool Arena::EnterAtOnce(BlockRecord* block, uint64_t id) {
  BiasedLock lock(mu_, By::kOwner);
  if (closed_) [[unlikely]]
    return false;
  books_.Enter(block, id);
  return true;
}

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_ARENA_H_
