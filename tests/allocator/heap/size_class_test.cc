// Properties that hold for every value of --//config:buckets_per_doubling and min_block_bytes.

#include "pinion/allocator/heap/size_class.h"

#include <algorithm>
#include <cstdint>
#include <random>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/config/build_config.h"

namespace pinion::internal {
namespace {

using config::kBucketsPerDoubling;

constexpr uint64_t kPageBytes = 4 * kKiB;

// Spread evenly over the doublings, so that small and large sizes are equally frequent.
uint64_t RandomSize(std::mt19937_64& random, uint64_t max_bytes) {
  const int log2 = std::uniform_int_distribution<int>(0, FloorLog2(max_bytes))(random);
  const uint64_t low = uint64_t{1} << log2;
  return std::uniform_int_distribution<uint64_t>(low, std::min(2 * low - 1, max_bytes))(random);
}

void CheckClass(uint64_t size_bytes) {
  const uint64_t rounded = RoundUpToSizeClass(size_bytes);
  const uint64_t unit = IsSmallClass(rounded) ? kMinBlockBytes : kPageBytes;
  ASSERT_GE(rounded, size_bytes);
  ASSERT_EQ(rounded % unit, 0u) << size_bytes;
  ASSERT_EQ(RoundUpToSizeClass(rounded), rounded) << size_bytes;
  const uint64_t waste = rounded - size_bytes;
  ASSERT_TRUE(waste < unit || kBucketsPerDoubling * waste <= size_bytes) << size_bytes;
  ASSERT_LT(waste, 2 * kMiB) << size_bytes;
}

TEST(SizeClassTest, EverySizeUpTo256KiBWastesLessThanAUnitOrAPartOfItself) {
  for (uint64_t size_bytes = 1; size_bytes <= 256 * kKiB; ++size_bytes) {
    ASSERT_NO_FATAL_FAILURE(CheckClass(size_bytes));
  }
}

TEST(SizeClassTest, RandomSizesWasteLessThanAUnitOrAPartOfThemselvesAndAtMost2MiB) {
  std::mt19937_64 random(20261121);
  for (int i = 0; i < 200000; ++i) {
    ASSERT_NO_FATAL_FAILURE(CheckClass(RandomSize(random, kMaxBlockBytes)));
  }
  ASSERT_NO_FATAL_FAILURE(CheckClass(kMaxBlockBytes));
}

TEST(SizeClassTest, AClassThatIsNotSmallIsRoundedUpToTheAlignment) {
  std::mt19937_64 random(8);
  for (uint64_t alignment_bytes = kPageBytes; alignment_bytes <= 4 * kMiB; alignment_bytes *= 2) {
    const auto check = [&](uint64_t size_bytes) {
      const uint64_t class_bytes = RoundUpToSizeClass(size_bytes);
      const uint64_t expected =
          IsSmallClass(class_bytes) ? class_bytes : AlignUp(class_bytes, alignment_bytes);
      ASSERT_EQ(RoundUpToSizeClass(size_bytes, alignment_bytes), expected) << size_bytes;
    };
    for (uint64_t size_bytes = 1; size_bytes <= 64 * kKiB; ++size_bytes) {
      ASSERT_NO_FATAL_FAILURE(check(size_bytes));
    }
    for (int i = 0; i < 10000; ++i) ASSERT_NO_FATAL_FAILURE(check(RandomSize(random, kGiB)));
  }
}

// A power-of-two cache locks 2 GiB for each of these stores. Production systems report 1.67 to 2
// times the requested bytes.
TEST(SizeClassTest, AStoreJustAboveAPowerOfTwoIsNotDoubled) {
  const uint64_t size_bytes = kGiB + kGiB / 5;
  EXPECT_LE(RoundUpToSizeClass(size_bytes) - size_bytes, 2 * kMiB);
}

TEST(SizeClassTest, ClassesGrowWithTheRequest) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 200000; ++i) {
    const uint64_t a = RandomSize(random, kMaxBlockBytes - 1);
    ASSERT_LE(RoundUpToSizeClass(a), RoundUpToSizeClass(a + 1)) << a;
  }
}

TEST(SizeClassTest, ADoublingHasAsManyClassesAsTheFlagSays) {
  const auto classes_from = [](uint64_t low) {
    uint64_t classes = 0;
    for (uint64_t size = low; size < 2 * low; size = RoundUpToSizeClass(size + 1)) ++classes;
    return classes;
  };
  for (uint64_t low = kBucketsPerDoubling * kMinBlockBytes; low < kSmallLimitBytes; low *= 2) {
    EXPECT_EQ(classes_from(low), kBucketsPerDoubling) << low;
  }
  for (uint64_t low = kBucketsPerDoubling * kPageBytes;
       low <= kBucketsPerDoubling * kMaxRoundingBytes; low *= 2) {
    EXPECT_EQ(classes_from(low), kBucketsPerDoubling) << low;
  }
}

TEST(SizeClassTest, BucketsAreContiguousAndOrdered) {
  BucketIndex bucket;
  while (bucket < BucketIndex{kLevels - 1, kBucketsPerLevel - 1}) {
    const bool last = bucket.within == kBucketsPerLevel - 1;
    const BucketIndex next =
        last ? BucketIndex{bucket.level + 1, 0} : BucketIndex{bucket.level, bucket.within + 1};
    ASSERT_LT(bucket, next);
    const uint64_t low = LowerBoundOf(bucket);
    ASSERT_LT(low, LowerBoundOf(next));
    ASSERT_EQ(BucketOf(low), bucket);
    ASSERT_EQ(BucketOf(LowerBoundOf(next) - 1), bucket);
    bucket = next;
  }
  EXPECT_EQ(LowerBoundOf({}), kMinBlockBytes);
}

TEST(SizeClassTest, EveryClassUpTo256MiBIsTheLowerBoundOfItsBucket) {
  for (uint64_t size = kMinBlockBytes; size <= 256 * kMiB; size = RoundUpToSizeClass(size + 1)) {
    ASSERT_EQ(LowerBoundOf(BucketOf(size)), size);
  }
}

}  // namespace
}  // namespace pinion::internal
