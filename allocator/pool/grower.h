// How a pool gets more memory: whether it may grow, by how much, what goes back for that, and who
// waits for whom.
//
//   nothing fits --> blocks whose tickets get done --> a segment --> room is made, once more
//
// Growths take what is locked to the next power of two until it is a chunk
// (AllocatorOptions::segment_bytes), and add chunks from there on. Each asks three, in this order:
// the pool's limit, the host's RAM, and the source. Where one of them has no room for a whole
// segment, a smaller one is tried, down to what the block needs. A reservation that the source
// refuses is not tried smaller.
//
// Thread safety: thread-safe. One thread at a time grows or trims: two that find nothing at once
// would both pin a whole segment. The others wait for it, and look again, but for a thread that is
// in the midst of another allocator's growth or trim (turn.h). Nothing is called with a lock held,
// but with the turn.
// Ownership: holds the pool for the allocator. When both go, the pool lives on as long as its
// blocks.

#ifndef PINION_ALLOCATOR_POOL_GROWER_H_
#define PINION_ALLOCATOR_POOL_GROWER_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/allocator_stats.h"
#include "pinion/allocator/heap/segment.h"
#include "pinion/allocator/pool/limited_source.h"
#include "pinion/allocator/pool/segment_pool.h"
#include "pinion/allocator/pool/turn.h"
#include "pinion/allocator/ram/ram_watermark.h"

namespace pinion::internal {

class Grower {
 public:
  // Who refused: each has its own remedy. kNone: nobody, or a source that is broken.
  enum class Refusal { kNone, kLimit, kWatermark, kSource };
  struct Result {
    absl::Status status = absl::OkStatus();
    Refusal refusal = Refusal::kNone;
    BlockRecord* block = nullptr;
  };

  Grower(std::shared_ptr<SegmentPool> pool, const AllocatorOptions& options,
         RamWatermark& watermark);
  ~Grower() { SegmentPool::Abandon(std::move(pool_)); }

  SegmentPool& pool() const { return *pool_; }

  // A block where no free one fits: one that was released and whose tickets get done in time, or
  // one of a new segment.
  Result AllocateOnMiss(uint64_t size_bytes);

  // As those of PinnedAllocator; Trim leaves it to the caller to sample the host.
  absl::Status Reserve(uint64_t size_bytes);
  LimitedSource::GivenBack Trim(uint64_t keep_bytes);

  AllocatorStats GetStats() const;

 private:
  // Adds a segment with room for a block of `size_bytes`, and takes that.
  Result Grow(uint64_t size_bytes);

  // What a growth asks for first: 64 MiB, then as much as takes what is locked to the next power of
  // two or, where that is less than 16 MiB away, to the one behind it; a chunk at most, and never
  // less than `least_bytes`.
  uint64_t WishedBytes(uint64_t least_bytes) const;

  // Adds a segment of `wished_bytes`, or of less where the limit, the host's RAM or (for a block)
  // the source has no more room, down to `least_bytes`; takes a block of `size_bytes` from it (0:
  // none).
  Result AddSegment(uint64_t wished_bytes, uint64_t least_bytes, uint64_t size_bytes,
                    RamWatermark::Wait wait);
  Result TryAddSegment(uint64_t segment_bytes, uint64_t size_bytes, RamWatermark::Wait wait);

  // Whether the limit and the host's RAM have room for so much more. Takes nothing.
  Result CheckRoom(uint64_t bytes);

  // Sees to it that a refused growth of `segment_bytes` may pass, with cached segments if those are
  // needed and enough. Returns the bytes that it may take then; 0 if it is refused for good.
  uint64_t MakeRoom(Refusal refusal, uint64_t segment_bytes);

  uint64_t Count(Refusal refusal) const { return refused_[static_cast<int>(refusal)]; }

  std::shared_ptr<SegmentPool> pool_;
  RamWatermark& watermark_;
  const uint64_t largest_chunk_bytes_;
  const absl::Duration max_wait_for_deferred_;
  Turn turn_;
  std::atomic<uint64_t> retries_ = 0;
  std::array<std::atomic<uint64_t>, 4> refused_ = {};  // requests, by who refused them
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_GROWER_H_
