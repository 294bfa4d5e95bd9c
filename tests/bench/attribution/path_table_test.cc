// The goals of methods along a path.

#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/bench/attribution/attribution_table.h"
#include "pinion/bench/goals.h"

namespace pinion {
namespace path_table_test {

PathRow Row(const PathWay& way, double time_us) {
  return {.model = "convnet float32",
          .preset = "a100_pcie4",
          .way = way,
          .budget_bytes = 100 * kMiB,
          .peak_bytes = 90 * kMiB,
          .time_us = time_us};
}

constexpr PathWay kCaptum = {.n_steps = 32, .budget_steps = 8};
constexpr PathWay kPinion = {.n_steps = 32, .budget_steps = 8, .is_pinion = true};

Goal GoalOf(const std::vector<PathRow>& rows, const std::string& name) {
  BenchReport report;
  AddAttributionGoals({.paths = rows}, report);
  for (const Goal& goal : report.goals()) {
    if (goal.name.find(name) != std::string::npos) return goal;
  }
  ADD_FAILURE() << "no goal has \"" << name << "\" in its name";
  return {};
}

TEST(PathTableTest, OnePassAboveTheBudgetIsTooMany) {
  std::vector<PathRow> rows = {Row(kPinion, 100), Row(kPinion, 100)};
  EXPECT_TRUE(GoalOf(rows, "peak over the budget").met());
  rows[0].peak_bytes = 100 * kMiB + 1;
  EXPECT_TRUE(GoalOf(rows, "peak over the budget").missed());
}

TEST(PathTableTest, CaptumMayTakeMoreThanTheBudget) {
  PathRow captum = Row(kCaptum, 100);
  captum.peak_bytes = 200 * kMiB;
  EXPECT_TRUE(GoalOf({captum, Row(kPinion, 100)}, "peak over the budget").met());
}

TEST(PathTableTest, TimesAreComparedWithCaptumsOfTheSameStepsInTheSameMemory) {
  std::vector<PathRow> rows = {Row(kCaptum, 100), Row(kPinion, 102)};
  EXPECT_TRUE(GoalOf(rows, "internal_batch_size").met());
  rows[1].time_us = 103;
  EXPECT_TRUE(GoalOf(rows, "internal_batch_size").missed());
  EXPECT_FALSE(GoalOf(rows, "one batch").value.has_value());
  rows[0].way.budget_steps = 32;
  EXPECT_FALSE(GoalOf(rows, "internal_batch_size").value.has_value());
  rows[1].way.budget_steps = 32;
  EXPECT_TRUE(GoalOf(rows, "one batch").met());
  rows[0].way.method = PathMethod::kLayerConductance;
  EXPECT_FALSE(GoalOf(rows, "one batch").value.has_value());
}

TEST(PathTableTest, OtherValuesThanCaptumsAreAMissedGoal) {
  PathRow row = Row(kPinion, 100);
  EXPECT_TRUE(GoalOf({row}, "values' difference").met());
  row.difference = 2e-5;
  EXPECT_TRUE(GoalOf({row}, "values' difference").missed());
}

}  // namespace path_table_test
}  // namespace pinion
