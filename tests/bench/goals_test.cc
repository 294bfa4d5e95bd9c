#include "pinion/bench/goals.h"

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

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

TEST(GoalsTest, WhatWasNotMeasuredIsNotMet) {
  BenchReport report;
  report.AddGoal("duplex", AtLeast(0), std::nullopt);
  EXPECT_FALSE(report.AllMet());
  EXPECT_THAT(report.GoalsText(), HasSubstr("MISSED  duplex: not measured (goal >= 0)"));
  EXPECT_TRUE(report.ToJson()["goals"][0]["value"].is_null());
  EXPECT_EQ(report.ToJson()["goals"][0]["met"], false);
}

TEST(GoalsTest, AReportWithoutGoalsMeetsThemAll) { EXPECT_TRUE(BenchReport().AllMet()); }

TEST(GoalsTest, TheFileHasRowsAndGoals) {
  BenchReport report;
  report.AddRow({{"case", "a"}, {"gb_per_s", 55.5}});
  report.AddRow({{"case", "b"}});
  report.AddGoal("speed", AtLeast(50), 55.5);
  report.AddGoal("waste", AtMost(0.1), 0.25);
  const std::string path = ::testing::TempDir() + "/goals_test.json";
  ASSERT_THAT(report.Write(path), testing::IsOk());
  std::ifstream file(path);
  const nlohmann::json json = nlohmann::json::parse(file);
  EXPECT_EQ(json, nlohmann::json::parse(R"({
    "rows": [{"case": "a", "gb_per_s": 55.5}, {"case": "b"}],
    "goals": [{"name": "speed", "goal": ">= 50", "value": 55.5, "met": true},
              {"name": "waste", "goal": "<= 0.1", "value": 0.25, "met": false}]})"));
  EXPECT_FALSE(report.AllMet());
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace pinion
