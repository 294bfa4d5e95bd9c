#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/engine/stats/engine_stats.h"

namespace pinion {
namespace {

constexpr double kRelativeError = 1.0 / 32 + 1e-9;

TEST(DurationHistogramTest, ASummaryOfNothingIsAllZero) {
  for (const DurationSummary& summary : {DurationSummary(), DurationHistogram().Summary()}) {
    EXPECT_EQ(summary.ToString(), "0 x, 0 ms in all, p50 0, p95 0, p99 0, max 0 ms");
  }
}

TEST(DurationHistogramTest, CountTotalAndMaximumAreExact) {
  DurationHistogram histogram;
  for (const double ms : {0.25, 7.0, 0.125}) histogram.Add(ms);
  const DurationSummary summary = histogram.Summary();
  EXPECT_EQ(summary.count, 3);
  EXPECT_EQ(summary.total_ms, 7.375);
  EXPECT_EQ(summary.max_ms, 7);
  EXPECT_NEAR(summary.p50_ms, 0.25, 0.25 * kRelativeError);
}

TEST(DurationHistogramTest, APercentileIsTheSmallestThatEnoughAreNotLongerThan) {
  DurationHistogram histogram;
  for (int i = 0; i < 95; ++i) histogram.Add(1);
  for (int i = 0; i < 5; ++i) histogram.Add(100);
  EXPECT_NEAR(histogram.PercentileMs(0.95), 1, kRelativeError);
  EXPECT_NEAR(histogram.PercentileMs(0.96), 100, 100 * kRelativeError);
  EXPECT_NEAR(histogram.PercentileMs(0.001), 1, kRelativeError);
  EXPECT_NEAR(histogram.PercentileMs(1), 100, 100 * kRelativeError);
}

TEST(DurationHistogramTest, NoPercentileIsLongerThanTheMaximum) {
  DurationHistogram histogram;
  histogram.Add(1.05);  // the lower end of its bucket
  EXPECT_EQ(histogram.PercentileMs(0.5), 1.05);
}

TEST(DurationHistogramTest, WhatIsTooShortOrTooLongToTellApartStillCounts) {
  DurationHistogram histogram;
  for (const double ms : {-1e-9, 0.0, 1e-7}) histogram.Add(ms);
  EXPECT_EQ(histogram.PercentileMs(1), 0);
  EXPECT_EQ(histogram.Summary().total_ms, 1e-7);
  constexpr double kDayMs = 24 * 3600 * 1e3;
  histogram.Add(kDayMs);
  const DurationSummary summary = histogram.Summary();
  EXPECT_EQ(summary.count, 4);
  EXPECT_EQ(summary.max_ms, kDayMs);
  EXPECT_GT(summary.p99_ms, 1e6);
}

TEST(DurationHistogramTest, ANanosecondIsToldApartFromNothing) {
  DurationHistogram histogram;
  histogram.Add(1e-6);
  EXPECT_EQ(histogram.PercentileMs(1), 1e-6);
}

TEST(DurationHistogramDeathTest, ThereIsNoPercentileOfNobodyOrOfMoreThanAll) {
  EXPECT_DEATH(DurationHistogram().PercentileMs(0), "a percentile of 0");
  EXPECT_DEATH(DurationHistogram().PercentileMs(1.01), "a percentile of 1.01; the share must be");
}

TEST(DurationHistogramDeathTest, ADurationThatIsNotFiniteIsNamed) {
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_DEATH(DurationHistogram().Add(infinity), "a duration of inf ms; it must be finite");
  EXPECT_DEATH(DurationHistogram().Add(-infinity), "a duration of -inf ms; it must be finite");
  EXPECT_DEATH(DurationHistogram().Add(std::nan("")), "a duration of nan ms; it must be finite");
}

class AgainstExactPercentilesTest : public ::testing::TestWithParam<int> {};

// Log-normal over nine decades, so that every octave occurs.
TEST_P(AgainstExactPercentilesTest, PercentilesAreWithinTheDocumentedError) {
  std::mt19937_64 random(GetParam());
  std::lognormal_distribution<double> durations_ms(-2, 3);
  const int count = std::uniform_int_distribution<int>(1, 3000)(random);
  DurationHistogram histogram;
  std::vector<double> exact(count);
  for (double& ms : exact) {
    ms = durations_ms(random);
    histogram.Add(ms);
  }
  std::sort(exact.begin(), exact.end());
  for (const double share : {0.001, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0}) {
    SCOPED_TRACE(::testing::Message()
                 << "seed " << GetParam() << ", " << count << " durations, " << share);
    const int rank = std::max(1, static_cast<int>(std::ceil(share * count)));
    const double expected = exact[rank - 1];
    EXPECT_NEAR(histogram.PercentileMs(share), expected, expected * kRelativeError);
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, AgainstExactPercentilesTest, ::testing::Range(1, 21));

}  // namespace
}  // namespace pinion
