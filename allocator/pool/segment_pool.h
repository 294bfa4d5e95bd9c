// What blocks belong to: the memory that a source has given, and the arenas that it is lent to, one
// per thread that allocates. Grower decides when to add a segment.
//
//   TryAllocate   this thread's arena, whose lock others take only when they miss, trim or count
//     |  nothing fits: under one lock of the pool
//     +-> some of what another arena has free  ->  a block of another arena
//                                              ->  a hole that goes on from arena to arena
//                                              ->  null: only then does the pool grow
//
// (Of what another one has free it takes a half, and no more than it has itself: a thread that
// wants little leaves the holes together.) So what a thread holds is what it uses, and what nobody
// has missed so far: before anything is pinned, or refused, all holes are looked at, whatever
// arenas they lie in. Threads that allocate at the same moment may fill a hole while it is looked
// at (docs/users/limits.md). A thread's end leaves its arena to the thread that gets its number
// (thread_slot.h), and to everyone who misses memory. Threads beyond kThreadSlots share one arena.
//
// PollDeferred and TakeDeferred ask the devices how far they are.
//
// Where the C++ heap has no memory, a release does without, and an allocation throws std::bad_alloc
// and has lost nothing. But what moves memory between arenas and the source is noexcept: rather
// than lose track of a piece it ends the process.
//
// Thread safety: thread-safe. Locks are taken in this order: the pool's, an arena's. No call to the
// source but JoinsAt, and none to a timeline but Completed(), is made while one is held.
// Ownership: shared by the allocator and, as one reference, all live blocks. The last one to go
// waits for a bounded time for tickets and gives the segments back; a segment whose tickets are
// not done by then is leaked, since a device may still be writing to it.

#ifndef PINION_ALLOCATOR_POOL_SEGMENT_POOL_H_
#define PINION_ALLOCATOR_POOL_SEGMENT_POOL_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/attributes.h"
#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/fork_origin.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/base/thread_slot.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/heap/block_records.h"
#include "pinion/allocator/heap/hardening.h"
#include "pinion/allocator/heap/segment.h"
#include "pinion/allocator/heap/size_class.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pool/arena.h"
#include "pinion/allocator/pool/arena_round.h"
#include "pinion/allocator/pool/limited_source.h"
#include "pinion/allocator/pool/pool_books.h"
#include "pinion/allocator/pool/segment_map.h"

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

  // A live block from what is free; null if nothing fits.
  BlockRecord* TryAllocate(uint64_t size_bytes);

  // What a block is from.
  static const SegmentPool& Of(const BlockRecord* block);

  // `id` is the one that the record had when it was handed out. Dies if that was released already.
  // In a child of fork() they do nothing: the memory may not be there, and the lock be taken.
  // Where the C++ heap has no memory to note tickets, whoever releases waits for them.
  static void Release(BlockRecord* block, uint64_t id);
  static void ReleaseAfter(BlockRecord* block, uint64_t id, absl::Span<const FenceTicket> tickets);

  // Asks the devices how far the timelines that blocks wait for have come. False if no block waits
  // for one any more; what came free before that is for TryAllocate to find, either way.
  bool PollDeferred();

  // A block that was released and whose tickets are done, or get done within `longest_wait`. Null
  // if none fits.
  BlockRecord* TakeDeferred(uint64_t size_bytes, absl::Duration longest_wait);

  // --- Segments ---

  // Adds a segment of source(), and takes a block of `size_bytes` at once, before anyone else can;
  // 0: none.
  BlockRecord* AddSegment(const HostSegment& segment, uint64_t size_bytes) noexcept;

  // Gives wholly free segments back to source().
  LimitedSource::GivenBack GiveBack(const SegmentMap::Removal& wanted) noexcept;

  // Whether an address lies in one of them.
  bool Owns(const void* address) const {
    MutexLock lock(mu_);
    return segments_.Contains(address);
  }

  // Free bytes that can serve blocks that are not small.
  uint64_t RoomForLargeBlocks();
  uint64_t locked_bytes() const;

  AllocatorStats GetStats();

  // The allocator goes: gives back what is free, and lives on only as long as blocks do.
  static void Abandon(std::shared_ptr<SegmentPool> pool);

 private:
  using Seat = ArenaRound::Seat;

  // What arenas leave, destroyed by whoever holds no lock.
  class Aftermath;

  // --- Arenas ---

  // This thread's.
  Seat Mine();
  Arena* AddArena(int slot);

  // --- Blocks ---

  uint64_t BookedBytes(uint64_t size_bytes) const;
  // What TryAllocate and Release do where this thread's arena has no block at once, and where the
  // block's is not this thread's. `way` is for the statistics.
  BlockRecord* TryAllocateThoroughly(uint64_t size_bytes, PoolBooks::Way way);
  static void ReleaseThoroughly(Arena& arena, Arena::By by, BlockRecord* block, uint64_t id);
  // A block where this thread's arena has none.
  BlockRecord* TakeFromOthers(const Seat& mine, const Arena::Request& request,
                              Aftermath* aftermath);
  // From a hole that lies in several arenas, or in pieces that move seldom.
  BlockRecord* TakeFromEnds(const ArenaRound& round, const Seat& mine,
                            const Arena::Request& request, Aftermath* aftermath)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  BlockRecord* TakeOverLocked(const Seat& seat, absl::Span<const HostSegment> pieces,
                              const Arena::Request& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Waits until something fits, nothing is deferred any more, or `timeout` has passed. Null unless
  // something fits.
  BlockRecord* WaitForDeferred(uint64_t size_bytes, absl::Duration timeout);
  // Why some are left, if any are.
  absl::Status WaitForAllDeferred(absl::Duration timeout);
  // Reclaims, and returns what the rest waits for next: one ticket per timeline.
  std::vector<FenceTicket> ReclaimAndListTickets();
  // So many of the blocks that outlived the allocator are gone. The pool may be, afterwards.
  void CountDown(uint64_t blocks);

  const ForkOrigin origin_;
  const AllocatorOptions options_;
  const uint64_t segment_bytes_;
  LimitedSource source_;

  // By the number of the thread that it is for; the last one is shared by those without a number.
  std::array<std::atomic<Arena*>, kThreadSlots + 1> arenas_ = {};

  // Held while memory moves between arenas, the source, and the statistics.
  mutable Mutex mu_;
  std::vector<std::unique_ptr<Arena>> all_arenas_ ABSL_GUARDED_BY(mu_);
  SegmentMap segments_ ABSL_GUARDED_BY(mu_);
  ByteGauge locked_bytes_ ABSL_GUARDED_BY(mu_);
  uint64_t trims_ ABSL_GUARDED_BY(mu_) = 0;
  // The live blocks' reference to the pool, once the allocator has gone, and how many they are.
  std::shared_ptr<SegmentPool> kept_by_blocks_ ABSL_GUARDED_BY(mu_);
  std::atomic<uint64_t> outliving_blocks_ = 0;
};

// --- What every allocation and release does, in line ---

inline uint64_t SegmentPool::BookedBytes(uint64_t size_bytes) const {
  return RoundUpToSizeClass(size_bytes + kRedZoneBytes, options_.alignment_bytes);
}

ABSL_ATTRIBUTE_ALWAYS_INLINE inline BlockRecord* SegmentPool::TryAllocate(uint64_t size_bytes) {
  const int slot = internal::thread_slot;
  Arena* const arena =
      0 <= slot && slot < kThreadSlots ? arenas_[slot].load(std::memory_order_relaxed) : nullptr;
  if (arena != nullptr) [[likely]] {
    BlockRecord* const block = arena->TryAllocateAtOnce(size_bytes, BookedBytes(size_bytes));
    if (block != nullptr) [[likely]] {
      if (kHardened) PrepareBlock(*block);
      return block;
    }
  }
  return TryAllocateThoroughly(size_bytes, PoolBooks::Way::kCached);
}

inline const SegmentPool& SegmentPool::Of(const BlockRecord* block) {
  return *BlockRecords::ArenaOf(block)->pool();
}

ABSL_ATTRIBUTE_ALWAYS_INLINE inline void SegmentPool::Release(BlockRecord* block, uint64_t id) {
  Arena& arena = *BlockRecords::ArenaOf(block);
  if (arena.pool()->origin_.InForkedChild()) [[unlikely]]
    return;
  const Arena::By by = arena.RoleOfThisThread();
  if (kHardened) {
    arena.MarkReleased(by, block, id);
    CheckAndPoisonBlock(*block);
  }
  if (by == Arena::By::kOwner && arena.EnterAtOnce(block, id)) return;
  ReleaseThoroughly(arena, by, block, id);
}

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_SEGMENT_POOL_H_
