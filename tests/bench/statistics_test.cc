#include "pinion/bench/statistics.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace pinion {
namespace {

TEST(StatisticsTest, QuantilesLieOnStraightLinesBetweenValues) {
  const std::vector<double> sorted = {10, 20, 30, 40};
  EXPECT_DOUBLE_EQ(Quantile(sorted, 0), 10);
  EXPECT_DOUBLE_EQ(Quantile(sorted, 0.5), 25);
  EXPECT_DOUBLE_EQ(Quantile(sorted, 0.05), 11.5);
  EXPECT_DOUBLE_EQ(Quantile(sorted, 1), 40);
}

TEST(StatisticsTest, OneValueIsItsOwnSummary) {
  const Summary summary = Summarize({7});
  EXPECT_EQ(summary.samples, 1);
  EXPECT_EQ(summary.median, 7);
  EXPECT_EQ(summary.p5, 7);
  EXPECT_EQ(summary.p95, 7);
  EXPECT_EQ(summary.cv, 0);
}

TEST(StatisticsTest, TheCoefficientOfVariationIsThatOfTheSample) {
  // The mean is 4; the squared deviations 4 + 0 + 4 have two degrees of freedom.
  EXPECT_DOUBLE_EQ(Summarize({2, 4, 6}).cv, 2.0 / 4);
}

TEST(StatisticsTest, OneOutlierMovesTheMedianLittle) {
  std::vector<double> values(10, 50);
  values[3] = 5000;
  EXPECT_EQ(Summarize(values).median, 50);
  EXPECT_GT(Summarize(values).cv, 1);
}

TEST(StatisticsTest, TheOrderOfValuesDoesNotMatter) {
  std::mt19937_64 random(11);
  std::vector<double> values;
  for (int i = 0; i < 101; ++i) values.push_back(i);
  for (int round = 0; round < 20; ++round) {
    std::shuffle(values.begin(), values.end(), random);
    const Summary summary = Summarize(values);
    EXPECT_EQ(summary.median, 50) << "seed 11, round " << round;
    EXPECT_EQ(summary.p5, 5) << "seed 11, round " << round;
    EXPECT_EQ(summary.p95, 95) << "seed 11, round " << round;
  }
}

}  // namespace
}  // namespace pinion
