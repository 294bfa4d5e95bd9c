#include "pinion/bench/test_pattern.h"

#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"

namespace pinion {
namespace {

constexpr uint64_t kBytes = 300 * kKiB + 5;

std::vector<char> Filled(const TestPattern& pattern, uint64_t offset_bytes = 0) {
  std::vector<char> bytes(kBytes);
  pattern.Fill(bytes.data(), offset_bytes, kBytes);
  return bytes;
}

TEST(TestPatternTest, WhatWasFilledMatches) {
  const TestPattern pattern(1);
  EXPECT_EQ(pattern.FirstDifference(Filled(pattern).data(), 0, kBytes), std::nullopt);
  EXPECT_EQ(pattern.FirstDifference(Filled(pattern, kMiB).data(), kMiB, kBytes), std::nullopt);
}

TEST(TestPatternTest, OneChangedByteIsFoundWhereverItIs) {
  const TestPattern pattern(1);
  for (const uint64_t at :
       {uint64_t{0}, uint64_t{7}, 64 * kKiB - 1, 64 * kKiB, 200 * kKiB + 3, kBytes - 1}) {
    std::vector<char> bytes = Filled(pattern);
    bytes[at] ^= 1;
    EXPECT_EQ(pattern.FirstDifference(bytes.data(), 0, kBytes), at);
  }
}

TEST(TestPatternTest, AnotherSeedMatchesNowhere) {
  EXPECT_EQ(TestPattern(1).FirstDifference(Filled(TestPattern(2)).data(), 0, kBytes), 0u);
}

// A copy displaced by a multiple of a power of two must bring different bytes.
TEST(TestPatternTest, AnotherPlaceOfTheSamePatternDiffers) {
  const TestPattern pattern(1);
  for (uint64_t shift = 64 * kKiB; shift <= kGiB; shift *= 2) {
    const std::optional<uint64_t> first =
        pattern.FirstDifference(Filled(pattern, shift).data(), 0, kBytes);
    ASSERT_TRUE(first.has_value()) << shift;
    EXPECT_LT(*first, sizeof(uint64_t)) << shift;
  }
}

}  // namespace
}  // namespace pinion
