#include "pinion/bench/goals.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::testing::HasSubstr;

TEST(GoalsTest, AGoalIsMetAtItsLimit) {
  EXPECT_TRUE(AtLeast(0.98).Holds(0.98));
  EXPECT_FALSE(AtLeast(0.98).Holds(0.979));
  EXPECT_TRUE(AtMost(12.5).Holds(12.5));
  EXPECT_FALSE(AtMost(12.5).Holds(12.6));
}

TEST(GoalsTest, WhatWasNotMeasuredIsNeitherMetNorMissed) {
  BenchReport report;
  report.AddGoal("duplex", AtLeast(0), std::nullopt);
  EXPECT_EQ(report.GoalsText(), "-       duplex: not measured (goal >= 0)\n");
  EXPECT_TRUE(report.ToJson()["goals"][0]["value"].is_null());
  EXPECT_TRUE(report.ToJson()["goals"][0]["met"].is_null());
  EXPECT_THAT(report.Finish(""), testing::IsOk());
}

TEST(GoalsTest, ARunThatMissesAGoalExitsWith1AndNamesIt) {
  BenchReport report;
  report.AddGoal("speed", AtLeast(50), 55.5);
  EXPECT_EQ(ExitCode("bench", report.Finish("")), 0);
  report.AddGoal("waste", AtMost(0.1), 0.25);
  const absl::Status finished = report.Finish("");
  EXPECT_THAT(std::string(finished.message()), HasSubstr("waste"));
  EXPECT_EQ(ExitCode("bench", finished), 1);
}

TEST(GoalsTest, ARunThatWentWrongExitsWith2) {
  EXPECT_EQ(ExitCode("bench", absl::InternalError("wrong bytes")), 2);
  EXPECT_EQ(ExitCode("bench", BenchReport().Finish("/no/such/dir/file")), 2);
}

TEST(GoalsTest, TheWorstRowDecidesAndRowsWithoutAValueDoNotCount) {
  const std::vector<double> rows = {3, -1, 5, 4};
  const auto value = [](double row) { return row < 0 ? std::nullopt : std::optional(row); };
  EXPECT_EQ(Worst(AtLeast(4), rows, value), 3);
  EXPECT_EQ(Worst(AtMost(4), rows, value), 5);
  EXPECT_EQ(Worst(AtMost(4), std::vector<double>{-1}, value), std::nullopt);
}

TEST(GoalsTest, RowsThatAreWrongAreCounted) {
  BenchReport report;
  for (const std::vector<int>& rows : {std::vector<int>{}, {1}, {-1, 1, -2}}) {
    report.AddNoneGoal("negative rows", rows, [](int row) { return row < 0; });
  }
  EXPECT_EQ(report.goals()[0].value, std::nullopt);
  EXPECT_EQ(report.goals()[1].value, 0);
  EXPECT_TRUE(report.goals()[1].met());
  EXPECT_EQ(report.goals()[2].value, 2);
  EXPECT_TRUE(report.goals()[2].missed());
}

TEST(GoalsTest, ATableHasAColumnPerFieldAndAHeadingOfWhatAllRowsShare) {
  const std::vector<nlohmann::ordered_json> rows = {
      {{"model", "gpt"}, {"way", "none"}, {"us", 12345.6}, {"same_bits", true}},
      {{"model", "gpt"}, {"way", "planned"}, {"us", 0.123456}}};
  EXPECT_EQ(RowsText(rows),
            "model gpt\n"
            "      way      us  same_bits\n"
            "     none   12346       true\n"
            "  planned  0.1235          -\n");
}

TEST(GoalsTest, TheFileHasRowsAndGoals) {
  BenchReport report;
  report.AddRow({{"case", "a"}, {"gb_per_s", 55.5}});
  report.AddRow({{"case", "b"}});
  report.AddGoal("speed", AtLeast(50), 55.5);
  report.AddGoal("waste", AtMost(0.1), 0.25);
  const std::string path = ::testing::TempDir() + "/goals_test.json";
  EXPECT_EQ(ExitCode("bench", report.Finish(path)), 1);
  std::ifstream file(path);
  const nlohmann::json json = nlohmann::json::parse(file);
  EXPECT_EQ(json, nlohmann::json::parse(R"({
    "rows": [{"case": "a", "gb_per_s": 55.5}, {"case": "b"}],
    "goals": [{"name": "speed", "goal": ">= 50", "value": 55.5, "met": true},
              {"name": "waste", "goal": "<= 0.1", "value": 0.25, "met": false}]})"));
  std::filesystem::remove(path);
}

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
