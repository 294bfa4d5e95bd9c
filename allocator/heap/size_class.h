// Size classes of blocks and the buckets of free blocks. Pure arithmetic.
//
// A request is rounded up to a size class. Each doubling has --//config:buckets_per_doubling
// classes, eight by default, so that rounding adds at most 12.5 %. Bounds at both ends:
//
//   below 32 KiB   classes are multiples of --//config:min_block_bytes, 256 by default
//   from there on  classes are multiples of a page, 4 KiB
//   rounding       adds at most 2 MiB
//
// A free block may have any multiple of its run's unit as size. Free blocks are kept in 64 buckets
// per doubling. Each class up to 256 MiB is the lower bound of a bucket, so every block of a
// request's bucket fits the request.
//
//   classes   |   8 MiB   |   9 MiB   |  10 MiB   |  ...
//   buckets   |.|.|.|.|.|.|.|.|.|.|.|.|.|.|.|.|.|.|.|
//
// Blocks below 32 KiB are cut from slabs (segment_heap.h). So all other blocks are whole pages.

#ifndef PINION_ALLOCATOR_HEAP_SIZE_CLASS_H_
#define PINION_ALLOCATOR_HEAP_SIZE_CLASS_H_

#include <algorithm>
#include <cstdint>

#include "pinion/allocator/base/bytes.h"
#include "pinion/config/build_config.h"

namespace pinion::internal {

// For values other than 0. Unlike std::bit_width, a single instruction.
constexpr int FloorLog2(uint64_t value) { return 63 ^ __builtin_clzll(value); }

inline constexpr uint64_t kMinBlockBytes = config::kMinBlockBytes;
inline constexpr uint64_t kMaxRoundingBytes = 2 * kMiB;
inline constexpr uint64_t kMaxBlockBytes = uint64_t{1} << 47;
// Classes below this size are small. Classes from this size on are multiples of 4 KiB.
inline constexpr uint64_t kSmallLimitBytes = 32 * kKiB;
// The class before kSmallLimitBytes.
inline constexpr uint64_t kLargestSmallClassBytes =
    kSmallLimitBytes - std::max(kMinBlockBytes, kSmallLimitBytes / 2 / config::kBucketsPerDoubling);

inline constexpr int kMinBlockLog2 = FloorLog2(kMinBlockBytes);
inline constexpr int kBucketsPerLevelLog2 = 6;
inline constexpr uint64_t kBucketsPerLevel = uint64_t{1} << kBucketsPerLevelLog2;
inline constexpr int kLevels = 48 - kMinBlockLog2;  // one per doubling, up to 2^48

// Returns the class of a request of 1 to kMaxBlockBytes bytes. A class that is not small is a
// multiple of `alignment_bytes`, a power of two and at least 4 KiB.
constexpr uint64_t RoundUpToSizeClass(uint64_t size_bytes, uint64_t alignment_bytes = 4 * kKiB) {
  const uint64_t least_step =
      size_bytes <= kLargestSmallClassBytes ? kMinBlockBytes : alignment_bytes;
  const uint64_t step = (uint64_t{1} << FloorLog2(size_bytes)) / config::kBucketsPerDoubling;
  return AlignUp(size_bytes, std::max(least_step, std::min(step, kMaxRoundingBytes)));
}

constexpr bool IsSmallClass(uint64_t class_bytes) { return class_bytes < kSmallLimitBytes; }

// The bucket of the free blocks from LowerBoundOf(bucket) to the next bucket's lower bound.
struct BucketIndex {
  int level = 0;        // the doubling
  uint64_t within = 0;  // index within the level

  constexpr auto operator<=>(const BucketIndex&) const = default;
};

// Requires kMinBlockBytes <= block_bytes < 2 * kMaxBlockBytes.
constexpr BucketIndex BucketOf(uint64_t block_bytes) {
  const int log2 = FloorLog2(block_bytes);
  return {log2 - kMinBlockLog2, (block_bytes >> (log2 - kBucketsPerLevelLog2)) % kBucketsPerLevel};
}

constexpr uint64_t LowerBoundOf(BucketIndex bucket) {
  return (kBucketsPerLevel + bucket.within)
         << (bucket.level + kMinBlockLog2 - kBucketsPerLevelLog2);
}

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_HEAP_SIZE_CLASS_H_
