// Sizes of blocks, and the buckets that free blocks are kept in. Pure arithmetic.
//
// A request is rounded up to a size class. Of each doubling there are
// --//config:buckets_per_doubling classes, eight by default: at most 12.5 % of a request is
// rounding. At the ends other steps hold:
//
//   below 32 KiB   classes are multiples of --//config:min_block_bytes, 256 by default
//   from there on  classes are multiples of a page, 4 KiB
//   largest step   2 MiB: no more than that is rounding
//
// Free blocks have any multiple of their run's unit as size, and are kept in 64 buckets per
// doubling. Every class up to 256 MiB is the lower bound of a bucket, so whatever lies in the
// bucket of a request fits it.
//
//   classes   |   8 MiB   |   9 MiB   |  10 MiB   |  ...
//   buckets   |.|.|.|.|.|.|.|.|.|.|.|.|.|.|.|.|.|.|.|
//
// Blocks below 32 KiB come from slabs, which are large blocks themselves: a small block that lives
// long does not cut a large hole in two, and every block that is not small is a whole number of
// pages.

#ifndef PINION_ALLOCATOR_HEAP_SIZE_CLASS_H_
#define PINION_ALLOCATOR_HEAP_SIZE_CLASS_H_

#include <algorithm>
#include <bit>
#include <cstdint>

#include "pinion/allocator/base/bytes.h"
#include "pinion/config/build_config.h"

namespace pinion::internal {

// Of a value that is not 0, so that it is one instruction, as std::bit_width is not.
constexpr int FloorLog2(uint64_t value) { return 63 ^ __builtin_clzll(value); }

inline constexpr uint64_t kMinBlockBytes = config::kMinBlockBytes;
inline constexpr uint64_t kMaxRoundingBytes = 2 * kMiB;
inline constexpr uint64_t kMaxBlockBytes = uint64_t{1} << 47;
// Classes below this are small; from here on they are multiples of 4 KiB.
inline constexpr uint64_t kSmallLimitBytes = 32 * kKiB;
// One step below.
inline constexpr uint64_t kLargestSmallClassBytes =
    kSmallLimitBytes - std::max(kMinBlockBytes, kSmallLimitBytes / 2 / config::kBucketsPerDoubling);

inline constexpr int kMinBlockLog2 = FloorLog2(kMinBlockBytes);
inline constexpr int kBucketsPerLevelLog2 = 6;
inline constexpr uint64_t kBucketsPerLevel = uint64_t{1} << kBucketsPerLevelLog2;
inline constexpr int kLevels = 48 - kMinBlockLog2;  // one per doubling, up to below 2^48

// The class of a request: 0 < size_bytes <= kMaxBlockBytes. A class that is not small is a multiple
// of `alignment_bytes`, a power of two and at least 4 KiB.
constexpr uint64_t RoundUpToSizeClass(uint64_t size_bytes, uint64_t alignment_bytes = 4 * kKiB) {
  const uint64_t least_step =
      size_bytes <= kLargestSmallClassBytes ? kMinBlockBytes : alignment_bytes;
  const uint64_t step = (uint64_t{1} << FloorLog2(size_bytes)) / config::kBucketsPerDoubling;
  return AlignUp(size_bytes, std::max(least_step, std::min(step, kMaxRoundingBytes)));
}

constexpr bool IsSmallClass(uint64_t class_bytes) { return class_bytes < kSmallLimitBytes; }

// A bucket holds the free blocks from LowerBoundOf(bucket) to below that of the next one.
struct BucketIndex {
  int level = 0;        // of the doubling
  uint64_t within = 0;  // the level

  constexpr auto operator<=>(const BucketIndex&) const = default;
};

// `block_bytes` is at least kMinBlockBytes and below 2 * kMaxBlockBytes.
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
