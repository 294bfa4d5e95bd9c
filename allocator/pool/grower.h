// Grows a pool: whether it may grow, by how much, and what it frees for that.
//
//   nothing fits --> blocks whose tickets get done --> a segment --> room is made, once more
//
// A growth raises the locked bytes to the next power of two, until segments reach a chunk
// (AllocatorOptions::segment_bytes). From then on it adds chunks. It needs the consent of the
// pool's limit, the host's RAM and the source, in this order. If one of them refuses, a smaller
// segment is tried, down to the block's size. Exception: Reserve is not tried smaller when the
// source refuses.
//
// Thread safety: thread-safe. Only one thread grows or trims the pool at a time; other threads wait
// and then search again. Exception: a thread inside another allocator's growth or trim does not
// wait (Turn). No lock is held during calls, only the turn. Ownership: holds the pool for the
// allocator. After both are destroyed, the pool lives as long as its blocks.

#ifndef PINION_ALLOCATOR_POOL_GROWER_H_
#define PINION_ALLOCATOR_POOL_GROWER_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/heap/block_records.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/pool/limited_source.h"
#include "pinion/allocator/pool/segment_pool.h"
#include "pinion/allocator/ram/ram_watermark.h"

namespace pinion::internal {

// A re-entrant serial section for long work that several threads may want done at once.
//
//   const TurnHolder mine(turn_);
//   if (AlreadyDone()) return;   // another thread was first
//   ...
//
// The work may call the operating system and user callbacks, so this is not a Mutex. A callback may
// come back to the same allocator on the same thread, so the section is re-entrant. A callback may
// also call another allocator, whose callback calls this one. To avoid a deadlock, a thread that is
// in one section does not wait for another one. The section must therefore be safe, if slower, when
// two threads are in it.
//
// Thread safety: thread-safe.
class Turn {
 private:
  friend class TurnHolder;

  Mutex mu_;
  CondVar ended_;
  bool is_taken_ ABSL_GUARDED_BY(mu_) = false;
};

extern constinit thread_local int turns_of_this_thread;  // sections that it is in

class TurnHolder {
 public:
  explicit TurnHolder(Turn& turn) : turn_(turn) {
    MutexLock lock(turn_.mu_);
    if (turns_of_this_thread++ == 0) {
      while (turn_.is_taken_) turn_.ended_.Wait(turn_.mu_);
    }
    has_it_ = !std::exchange(turn_.is_taken_, true);
  }
  ~TurnHolder() {
    --turns_of_this_thread;
    if (!has_it_) return;
    {
      MutexLock lock(turn_.mu_);
      turn_.is_taken_ = false;
    }
    turn_.ended_.NotifyAll();
  }
  TurnHolder(const TurnHolder&) = delete;
  TurnHolder& operator=(const TurnHolder&) = delete;

 private:
  Turn& turn_;
  bool has_it_ = false;  // false: the section is entered again, or another thread's
};

class Grower {
 public:
  // Who refused. kNone: nobody, or a broken source.
  enum class Refusal { kNone, kLimit, kWatermark, kSource };
  struct Result {
    absl::Status status = absl::OkStatus();
    Refusal refusal = Refusal::kNone;
    BlockRecord* block = nullptr;
  };

  Grower(std::shared_ptr<HostMemorySource> source, const AllocatorOptions& options,
         RamWatermark& watermark);
  ~Grower() { SegmentPool::Abandon(std::move(pool_)); }

  SegmentPool& pool() const { return *pool_; }

  // Returns a block when nothing free fits: a deferred block whose tickets become done in time, or
  // a block of a new segment.
  Result AllocateOnMiss(uint64_t size_bytes);

  // Like the functions of PinnedAllocator. The caller of Trim samples the host.
  absl::Status Reserve(uint64_t size_bytes);
  LimitedSource::GivenBack Trim(uint64_t keep_bytes);

  AllocatorStats GetStats() const;

 private:
  // Adds a segment, and takes a block of `size_bytes` from it.
  Result Grow(uint64_t size_bytes);

  // Returns the size that a growth asks for first. That is 64 MiB for an empty pool. Then it raises
  // the locked bytes to a power of two that is at least 16 MiB away. At most a chunk, and at least
  // `least_bytes`.
  uint64_t WishedBytes(uint64_t least_bytes) const;

  // Adds a segment of `wished_bytes`, and takes a block of `size_bytes` (0: none) from it. Tries
  // smaller segments, down to `least_bytes`, if the limit or the host's RAM refuses. Does so for a
  // refusal by the source only if a block is needed. `wait_left`: see RamWatermark::AdmitGrowth.
  Result AddSegment(uint64_t wished_bytes, uint64_t least_bytes, uint64_t size_bytes,
                    absl::Duration& wait_left);
  Result TryAddSegment(uint64_t segment_bytes, uint64_t size_bytes, absl::Duration& wait_left);

  // Checks that the limit and the host's RAM have room for `bytes`. Takes nothing.
  Result CheckRoom(uint64_t bytes);

  // Makes a refused growth of `segment_bytes` possible, by freeing cached segments if that
  // suffices. Returns the bytes that the growth may take, or 0 if it stays refused.
  uint64_t MakeRoom(Refusal refusal, uint64_t segment_bytes);

  uint64_t Count(Refusal refusal) const { return refused_[static_cast<int>(refusal)]; }

  std::shared_ptr<SegmentPool> pool_;
  RamWatermark& watermark_;
  const uint64_t largest_chunk_bytes_;
  const absl::Duration max_wait_for_deferred_;
  Turn turn_;
  std::atomic<uint64_t> retries_ = 0;
  std::array<std::atomic<uint64_t>, 4> refused_ = {};  // requests, by who refused
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_GROWER_H_
