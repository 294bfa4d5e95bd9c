#include "pinion/bench/attribution/attribution_table.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/bench/goals.h"

namespace pinion {
namespace attribution_table_test {

using Kind = AttributionWay::Kind;
using Method = AttributionWay::Method;

AttributionRow Row(const AttributionWay& way, double time_us, uint64_t peak_mib) {
  return {.model = "gpt float32",
          .preset = "a100_pcie4",
          .way = way,
          .cost = {.time_us = time_us, .arithmetic_us = 1, .peak_bytes = peak_mib * kMiB},
          .two_largest_bytes = 10 * kMiB,
          .bound_us = 100};
}

// Returns all goals whose name contains `name`, in order.
std::vector<Goal> GoalsOf(const std::vector<AttributionRow>& rows, const std::string& name) {
  std::vector<Goal> goals;
  BenchReport report;
  AddAttributionGoals({.rows = rows}, report);
  for (const Goal& goal : report.goals()) {
    if (goal.name.find(name) != std::string::npos) goals.push_back(goal);
  }
  EXPECT_FALSE(goals.empty()) << "no goal has \"" << name << "\" in its name";
  return goals;
}
Goal GoalOf(const std::vector<AttributionRow>& rows, const std::string& name) {
  return GoalsOf(rows, name).at(0);
}

TEST(AttributionTableTest, ThePeakMayBeTheStepsAndTheTwoLargestCaptures) {
  std::vector<AttributionRow> rows = {Row({.kind = Kind::kPlain}, 100, 50),
                                      Row({.kind = Kind::kPinion}, 100, 60)};
  EXPECT_TRUE(GoalOf(rows, "peak").met());
  rows.back().cost.peak_bytes += 1;
  EXPECT_TRUE(GoalOf(rows, "peak").missed());
}

TEST(AttributionTableTest, WhoCopiesAsWellIsToBeSlower) {
  std::vector<AttributionRow> rows = {Row({.kind = Kind::kCaptumThenCpu}, 100, 0),
                                      Row({.kind = Kind::kCaptumMemoryEfficient}, 200, 0),
                                      Row({.kind = Kind::kPinion}, 98, 0)};
  EXPECT_TRUE(GoalOf(rows, "time over captum, then").met());
  EXPECT_TRUE(GoalOf(rows, "time over captum, memory").met());
  rows.back().cost.time_us = 100;
  EXPECT_TRUE(GoalOf(rows, "time over captum, then").missed());
  EXPECT_TRUE(GoalOf(rows, "time over captum, memory").met());
}

TEST(AttributionTableTest, RowsAreComparedWithinTheirModelTheirPresetAndTheirMethod) {
  const AttributionRow pinion = Row({.kind = Kind::kPinion}, 100, 0);
  AttributionRow other_model = Row({.kind = Kind::kCaptumThenCpu}, 1, 0);
  AttributionRow other_preset = other_model, other_method = other_model;
  other_model.model = "unet float32";
  other_preset.preset = "gh200_c2c";
  other_method.way.method = Method::kActivation;
  for (const Goal& goal :
       GoalsOf({pinion, other_model, other_preset, other_method}, "time over captum, then")) {
    EXPECT_FALSE(goal.value.has_value()) << goal.name;
  }
}

TEST(AttributionTableTest, ThePlainDefaultCountsWhereTheLinkCanHideTheCopies) {
  std::vector<AttributionRow> rows = {Row({.kind = Kind::kCaptum}, 100, 0),
                                      Row({.kind = Kind::kPinion}, 103, 0)};
  rows.back().bound_us = 100.9;
  EXPECT_TRUE(GoalOf(rows, "gradient x activation, where the link").missed());
  rows.back().cost.time_us = 102;
  EXPECT_TRUE(GoalOf(rows, "gradient x activation, where the link").met());
  rows.back().bound_us = 101.1;
  EXPECT_FALSE(GoalOf(rows, "gradient x activation, where the link").value.has_value());
}

TEST(AttributionTableTest, WhatIsWrongWithPinionsResultsIsCounted) {
  AttributionRow row = Row({.kind = Kind::kPinion}, 100, 0);
  EXPECT_TRUE(GoalOf({row}, "other values").met());
  EXPECT_TRUE(GoalOf({row}, "are held").met());
  EXPECT_TRUE(GoalOf({row}, "no time on the host").met());
  row.same_values = false;
  row.cost.held_bytes = 1;
  row.cost.arithmetic_us = 0;
  EXPECT_EQ(GoalOf({row, row}, "other values").value, 2);
  EXPECT_TRUE(GoalOf({row}, "are held").missed());
  EXPECT_EQ(GoalOf({row, row}, "no time on the host").value, 2);
  row.way.method = Method::kActivation;  // this method has no products
  EXPECT_TRUE(GoalOf({row}, "no time on the host").met());
}

}  // namespace attribution_table_test
}  // namespace pinion
