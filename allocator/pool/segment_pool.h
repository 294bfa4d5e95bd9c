// The memory of a PinnedAllocator: segments of a source, lent to one arena per allocating thread.
// Grower decides when to add a segment.
//
//   TryAllocate   this thread's arena; other threads rarely take its lock
//     |  nothing fits: under the pool's lock
//     +-> free memory of another arena moves here  ->  a block of another arena
//                                                  ->  a hole that spans several arenas
//                                                  ->  null: only then does the pool grow
//
// An arena takes half of what another one has free, and at most as much as it has itself. So a
// thread that needs little does not scatter the holes. Before the pool grows or refuses, all holes
// of all arenas are searched. Exception: threads that allocate at that moment may fill a hole
// during the search (docs/users/limits.md).
//
// When a thread ends, its arena passes to the next thread with its number (thread_slot.h). Threads
// beyond kThreadSlots share one arena.
//
// PollDeferred and TakeDeferred call the devices.
//
// If the C++ heap is full, a release still works, and an allocation throws std::bad_alloc and loses
// nothing. Functions that move memory between arenas and the source are noexcept: they end the
// process rather than lose memory.
//
// Thread safety: thread-safe. Lock order: the pool's lock, then an arena's. With a lock held, the
// pool calls only JoinsAt of the source and Completed() of timelines. Ownership: shared by the
// allocator and all live blocks, which are one reference together. The destructor waits for tickets
// for a bounded time and frees the segments. It leaks segments that still have open tickets,
// because a device may be writing to them.

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
#include "pinion/allocator/base/fork_origin.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/base/thread_slot.h"
#include "pinion/allocator/fence.h"
#include "pinion/allocator/heap/block_records.h"
#include "pinion/allocator/heap/hardening.h"
#include "pinion/allocator/heap/size_class.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pool/arena.h"
#include "pinion/allocator/pool/limited_source.h"
#include "pinion/allocator/pool/segment_map.h"

namespace pinion::internal {

class SegmentPool {
 public:
  // Uses the options' limit, segment size, and alignment (at most the source's granularity).
  SegmentPool(std::shared_ptr<HostMemorySource> source, const AllocatorOptions& options);
  ~SegmentPool();
  SegmentPool(const SegmentPool&) = delete;
  SegmentPool& operator=(const SegmentPool&) = delete;

  LimitedSource& source() { return source_; }
  bool pinned() const { return source_.pinned(); }
  uint64_t segment_bytes() const { return options_.segment_bytes; }

  // Returns the size of the smallest segment with room for a request of 1 to kMaxBlockBytes bytes.
  uint64_t LeastSegmentBytes(uint64_t size_bytes) const;

  // --- Blocks ---

  // Returns a live block from free memory, or null if nothing fits.
  BlockRecord* TryAllocate(uint64_t size_bytes);

  // `id` is the record's id when the block was allocated. Dies if the block was already released.
  // Does nothing in a child of fork(), which may lack the memory and find the lock taken. If the
  // C++ heap has no memory for the tickets, ReleaseAfter waits for them.
  static void Release(BlockRecord* block, uint64_t id);
  static void ReleaseAfter(BlockRecord* block, uint64_t id, absl::Span<const FenceTicket> tickets);

  // Asks devices for the progress of the timelines that blocks wait for. Returns false if no block
  // waits. Does not allocate: call TryAllocate afterwards.
  bool PollDeferred();

  // Returns a released block whose tickets are done, or become done within `longest_wait`. Null if
  // none fits.
  BlockRecord* TakeDeferred(uint64_t size_bytes, absl::Duration longest_wait);

  // --- Segments ---

  // Adds a segment of source() and takes a block of `size_bytes` from it, before other threads can.
  // Takes none if `size_bytes` is 0.
  BlockRecord* AddSegment(const HostSegment& segment, uint64_t size_bytes) noexcept;

  // Returns free segments to source().
  LimitedSource::GivenBack GiveBack(const SegmentMap::Removal& wanted) noexcept;

  // Returns whether an address lies in a segment.
  bool Owns(const void* address) const {
    MutexLock lock(mu_);
    return segments_.Contains(address);
  }

  // Returns the free bytes for blocks that are not small.
  uint64_t RoomForLargeBlocks();
  uint64_t locked_bytes() const;

  AllocatorStats GetStats();

  // Called by the allocator's destructor. Frees unused memory; the pool then lives as long as its
  // blocks.
  static void Abandon(std::shared_ptr<SegmentPool> pool);

 private:
  using Seat = ArenaRound::Seat;

  // Objects to be destroyed when no lock is held.
  class Aftermath;

  // --- Arenas ---

  // Returns this thread's arena.
  Seat Mine();
  Arena* AddArena(int slot);

  // --- Blocks ---

  uint64_t BookedBytes(uint64_t size_bytes) const;
  // The slow paths of TryAllocate and Release: the arena has no block ready, or belongs to another
  // thread.
  BlockRecord* TryAllocateThoroughly(uint64_t size_bytes);
  static void ReleaseThoroughly(Arena& arena, Arena::By by, BlockRecord* block, uint64_t id);
  // Returns a block if this thread's arena has none.
  BlockRecord* TakeFromOthers(const Seat& mine, const Arena::Request& request,
                              Aftermath* aftermath);
  // Returns a block from a hole that spans arenas, or from the free ends of their memory.
  BlockRecord* TakeFromEnds(const ArenaRound& round, const Seat& mine,
                            const Arena::Request& request, Aftermath* aftermath)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  BlockRecord* TakeOverLocked(const Seat& seat, absl::Span<const HostSegment> pieces,
                              const Arena::Request& request) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Waits until a block fits, no block is deferred, or `timeout` has passed. Returns null if
  // nothing fits.
  BlockRecord* WaitForDeferred(uint64_t size_bytes, absl::Duration timeout);
  // Returns why some blocks are still deferred, or OK.
  absl::Status WaitForAllDeferred(absl::Duration timeout);
  // Reclaims blocks. Returns the next ticket of each timeline that the rest waits for.
  DeferredReleases::NextTickets Reclaim();
  // Records that `blocks` live blocks are released after Abandon. May destroy the pool.
  void CountDown(uint64_t blocks);

  const ForkOrigin origin_;
  const AllocatorOptions options_;
  LimitedSource source_;

  std::atomic<uint64_t> polled_hits_ = 0;
  std::atomic<uint64_t> waits_for_deferred_ = 0;
  std::atomic<uint64_t> waited_hits_ = 0;

  // By thread number. Threads without a number share the last arena.
  std::array<std::atomic<Arena*>, kThreadSlots + 1> arenas_ = {};

  // Held while memory moves between arenas, the source, and the statistics.
  mutable Mutex mu_;
  std::vector<std::unique_ptr<Arena>> all_arenas_ ABSL_GUARDED_BY(mu_);
  SegmentMap segments_ ABSL_GUARDED_BY(mu_);
  ByteGauge locked_bytes_ ABSL_GUARDED_BY(mu_);
  uint64_t trims_ ABSL_GUARDED_BY(mu_) = 0;
  // After Abandon: the reference of all live blocks, and their number.
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
  return TryAllocateThoroughly(size_bytes);
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
