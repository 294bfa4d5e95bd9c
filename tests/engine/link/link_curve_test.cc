#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::vector<CopyTime> TimesOn(const LinkCurve& curve) {
  std::vector<CopyTime> times;
  for (uint64_t size_bytes = 4 * kKiB; size_bytes <= kGiB; size_bytes *= 4) {
    times.push_back({size_bytes, curve.CopyUs(size_bytes)});
  }
  return times;
}

TEST(LinkCurveTest, HalfOfTheBandwidthIsReachedAtTheHalfPerformanceSize) {
  const LinkCurve curve = {.fixed_us = 3, .piece_us = 1, .gb_per_s = 50};
  EXPECT_DOUBLE_EQ(curve.HalfPerformanceBytes(), 150000);
  EXPECT_DOUBLE_EQ(curve.CopyUs(150000), 6);
  EXPECT_DOUBLE_EQ(curve.CopyGbPerS(150000), 25);
}

TEST(LinkCurveTest, AnySizeHasATimeWhichIsInfiniteWithoutABandwidth) {
  const LinkCurve curve = {.fixed_us = 3, .piece_us = 1, .gb_per_s = 50};
  EXPECT_DOUBLE_EQ(curve.CopyUs(0), 3);
  EXPECT_DOUBLE_EQ(curve.CopyGbPerS(0), 0);
  EXPECT_TRUE(std::isfinite(curve.CopyUs(UINT64_MAX)));
  EXPECT_TRUE(std::isinf(LinkCurve().CopyUs(1)));
}

TEST(LinkCurveTest, AFitFindsTheLineBack) {
  for (const double fixed_us : {0.0, 3.0, 40.0}) {
    for (const double gb_per_s : {2.5, 55.6, 421.0}) {
      PINION_ASSERT_OK_AND_ASSIGN(
          const LinkCurve curve,
          FitLinkCurve(TimesOn({.fixed_us = fixed_us, .gb_per_s = gb_per_s})));
      EXPECT_NEAR(curve.fixed_us, fixed_us, 1e-6);
      EXPECT_NEAR(curve.gb_per_s, gb_per_s, 1e-6 * gb_per_s);
    }
  }
}

// Ordinary least squares would put all noise of the 1 GiB copy into the fixed cost.
TEST(LinkCurveTest, NoiseInProportionToTheTimesHardlyMovesTheFixedCost) {
  const LinkCurve truth = {.fixed_us = 3, .gb_per_s = 55};
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> noise(0.98, 1.02);
  std::vector<CopyTime> times = TimesOn(truth);
  for (CopyTime& time : times) time.us *= noise(random);
  PINION_ASSERT_OK_AND_ASSIGN(const LinkCurve curve, FitLinkCurve(times));
  EXPECT_NEAR(curve.fixed_us, truth.fixed_us, 0.03 * truth.fixed_us) << "seed 7";
  EXPECT_NEAR(curve.gb_per_s, truth.gb_per_s, 0.03 * truth.gb_per_s) << "seed 7";
}

// Small sums must not lose precision.
TEST(LinkCurveTest, ALineOfTwoTinyCopiesIsExact) {
  const std::vector<CopyTime> times = {{1, 1.0}, {2, 1.5}};
  PINION_ASSERT_OK_AND_ASSIGN(const LinkCurve curve, FitLinkCurve(times));
  EXPECT_NEAR(curve.fixed_us, 0.5, 1e-9);
  EXPECT_NEAR(curve.gb_per_s, 2e-3, 1e-12);
}

TEST(LinkCurveTest, WhatWasNotMeasuredIsZero) {
  const LinkCurve curve;
  EXPECT_EQ(curve.fixed_us, 0);
  EXPECT_EQ(curve.piece_us, 0);
  EXPECT_EQ(curve.gb_per_s, 0);
  const CopyTime time;
  EXPECT_EQ(time.size_bytes, 0u);
  EXPECT_EQ(time.us, 0);
}

TEST(LinkCurveTest, TheFixedCostIsNeverNegative) {
  const std::vector<CopyTime> times = {{1000, 0.5}, {1000000, 1000}};
  PINION_ASSERT_OK_AND_ASSIGN(const LinkCurve curve, FitLinkCurve(times));
  EXPECT_EQ(curve.fixed_us, 0);
  EXPECT_GT(curve.gb_per_s, 0);
}

TEST(LinkCurveTest, OneSizeMakesNoLine) {
  const auto refused = StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("two sizes"));
  EXPECT_THAT(FitLinkCurve(std::vector<CopyTime>{{4096, 3}, {4096, 3.1}, {4096, 2.9}}), refused);
  EXPECT_THAT(FitLinkCurve({}), refused);
  // Rounding hides differences below one in fifteen thousand.
  EXPECT_THAT(FitLinkCurve(std::vector<CopyTime>{{1'000'000, 10}, {1'000'050, 10.001}}), refused);
  EXPECT_THAT(FitLinkCurve(std::vector<CopyTime>{{1'000'000, 10}, {1'000'070, 10.001}}), IsOk());
}

TEST(LinkCurveTest, TimesThatShrinkWithTheSizeAreNoise) {
  const auto refused = StatusIs(absl::StatusCode::kInvalidArgument,
                                AllOf(HasSubstr("noise"), HasSubstr("measure larger copies")));
  EXPECT_THAT(FitLinkCurve(std::vector<CopyTime>{{4096, 30}, {8192, 3}, {16384, 0.1}}), refused);
  EXPECT_THAT(FitLinkCurve(std::vector<CopyTime>{{4096, 1}, {8192, 1}}), refused);
}

TEST(LinkCurveTest, ATimeOrASizeThatIsNotPositiveIsRefused) {
  const auto refused = StatusIs(absl::StatusCode::kInvalidArgument,
                                AllOf(HasSubstr("cannot have taken"), HasSubstr("give a size")));
  for (const CopyTime& time : {CopyTime{4096, 0.0}, CopyTime{4096, -1.0}, CopyTime{4096, HUGE_VAL},
                               CopyTime{4096, std::nan("")}, CopyTime{0, 1}}) {
    EXPECT_THAT(FitLinkCurve(std::vector<CopyTime>{time, {kMiB, 20}}), refused)
        << time.size_bytes << " bytes in " << time.us << " us";
  }
}

}  // namespace
}  // namespace pinion::testing
