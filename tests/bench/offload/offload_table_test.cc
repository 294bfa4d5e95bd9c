#include "pinion/bench/offload/offload_table.h"

#include <limits>
#include <optional>
#include <string>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/bench/goals.h"
#include "pinion/bench/offload/offload_method.h"

namespace pinion {
namespace offload_table_test {

using Kind = OffloadMethod::Kind;

OffloadRow Row(const OffloadMethod& method, double step_us, uint64_t peak_mib) {
  OffloadRow row;
  row.model = "gpt float32";
  row.preset = "a100_pcie4";
  row.method = method;
  row.cost = {.step_us = step_us, .peak_bytes = peak_mib * kMiB};
  row.alone_us = 100;
  row.bound_us = 120;
  return row;
}

OffloadRow Planned(double step_us, std::optional<double> offline_us = std::nullopt) {
  OffloadRow row = Row({Kind::kPlanned, 50 * kMiB}, step_us, 50);
  row.offline_us = offline_us;
  return row;
}

OffloadRow Recompute(double step_us, uint64_t target_mib) {
  OffloadRow row = Row({Kind::kPlannedRecompute, target_mib * kMiB}, step_us, target_mib);
  row.computed_again = 3;
  return row;
}

Goal GoalOf(const OffloadTable& table, const std::string& name) {
  BenchReport report;
  AddOffloadGoals(table, report);
  for (const Goal& goal : report.goals()) {
    if (goal.name.find(name) != std::string::npos) return goal;
  }
  ADD_FAILURE() << "no goal has \"" << name << "\" in its name";
  return {};
}

TEST(OffloadTableTest, ATargetThatBindsAsksFor97PercentOfTheBound) {
  EXPECT_TRUE(GoalOf({.rows = {Planned(120 / 0.971, 121)}}, "efficiency").met());
  EXPECT_TRUE(GoalOf({.rows = {Planned(120 / 0.969, 121)}}, "efficiency").missed());
}

TEST(OffloadTableTest, WhereTheOfflinePlanIsFarFromTheBoundItAsksFor99PercentOfThat) {
  EXPECT_TRUE(GoalOf({.rows = {Planned(130 / 0.991, 130)}}, "efficiency").met());
  EXPECT_TRUE(GoalOf({.rows = {Planned(130 / 0.989, 130)}}, "efficiency").missed());
}

TEST(OffloadTableTest, TheWorstRowDecides) {
  const OffloadTable table = {.rows = {Planned(121, 121), Planned(140, 121), Planned(121, 121)}};
  EXPECT_TRUE(GoalOf(table, "efficiency").missed());
}

TEST(OffloadTableTest, ATargetThatFitsAllIsNoneThatBinds) {
  EXPECT_FALSE(GoalOf({.rows = {Planned(300)}}, "efficiency").value.has_value());
}

TEST(OffloadTableTest, APeakAboveItsTargetIsSeen) {
  OffloadRow row = Planned(121, 121);
  EXPECT_TRUE(GoalOf({.rows = {row}}, "peak over target").met());
  row.cost.peak_bytes += kMiB;
  EXPECT_TRUE(GoalOf({.rows = {row}}, "peak over target").missed());
}

TEST(OffloadTableTest, WhatTheLinkCanHideIsToCostNothing) {
  OffloadRow row = Planned(103, 103);
  EXPECT_FALSE(GoalOf({.rows = {row}}, "can hide").value.has_value());
  row.bound_us = 101;
  EXPECT_TRUE(GoalOf({.rows = {row}}, "can hide").missed());
}

TEST(OffloadTableTest, APlannedStepIsComparedWithTheMethodWhosePeakItsTargetIs) {
  OffloadRow planned = Planned(125, 125);
  planned.at_the_peak_of = Kind::kTrl;
  OffloadTable table = {.rows = {Row({Kind::kTrl}, 124, 50), planned}};
  EXPECT_TRUE(GoalOf(table, "peak of trl").missed());
  EXPECT_FALSE(GoalOf(table, "peak of windows").value.has_value());
  EXPECT_FALSE(GoalOf(table, "where trl takes").value.has_value());
  table.rows[0].cost.step_us = 163;
  EXPECT_TRUE(GoalOf(table, "peak of trl").met());
  EXPECT_TRUE(GoalOf(table, "where trl takes").met());
  table.rows[0].cost.step_us = 162;
  EXPECT_TRUE(GoalOf(table, "where trl takes").missed());
}

TEST(OffloadTableTest, WithRecomputeAStepIsNotToBeSlowerThanWithoutAtTheSameTarget) {
  const std::string goal = "over planned at the same target";
  OffloadTable table = {.rows = {Planned(125), Recompute(125, 50), Recompute(300, 40)}};
  EXPECT_TRUE(GoalOf(table, goal).met()) << "nothing was planned for 40 MiB";
  table.rows[1].cost.step_us = 126;
  EXPECT_TRUE(GoalOf(table, goal).missed());
  table.rows[0].preset = "gh200_c2c";
  EXPECT_FALSE(GoalOf(table, goal).value.has_value());
}

TEST(OffloadTableTest, WhereTheLinkIsFarFromHidingItAStepWithRecomputeIsToBeBelowTheBound) {
  OffloadTable table = {.rows = {Planned(125), Recompute(121, 50), Recompute(119, 40)}};
  EXPECT_FALSE(GoalOf(table, "over 1.2 of none").value.has_value());
  for (OffloadRow& row : table.rows) row.bound_us = 120.1;
  EXPECT_TRUE(GoalOf(table, "over 1.2 of none").missed());
  table.rows[1].cost.step_us = 120;
  EXPECT_TRUE(GoalOf(table, "over 1.2 of none").met());
}

TEST(OffloadTableTest, WhatMayComputeAgainIsComparedWithWhatComputesAllAgain) {
  OffloadRow recompute = Recompute(125, 50);
  recompute.at_the_peak_of = Kind::kCheckpoint;
  const OffloadTable table = {.rows = {Row({Kind::kCheckpoint}, 124, 50), recompute}};
  EXPECT_TRUE(GoalOf(table, "peak of checkpoint every block").missed());
  EXPECT_EQ(JsonOf(recompute)["target_of"], "checkpoint every block");
  EXPECT_EQ(JsonOf(recompute)["computed_again"], 3);
}

TEST(OffloadTableTest, OtherBitsAreCounted) {
  OffloadTable table;
  EXPECT_FALSE(GoalOf(table, "other bits").value.has_value());
  table.values.push_back({.model = "unet", .preset = "a100_pcie4", .same_bits = true});
  EXPECT_TRUE(GoalOf(table, "other bits").met());
  table.values.push_back({.model = "", .preset = "", .method = {Kind::kTrl}, .same_bits = false});
  EXPECT_TRUE(GoalOf(table, "other bits").met()) << "a peer's";
  table.values.front().same_bits = false;
  EXPECT_TRUE(GoalOf(table, "other bits").missed());
}

TEST(OffloadTableTest, WhereNoPolicyCanDoWithThatMemoryThereIsNoBound) {
  OffloadRow row = Row({Kind::kCheckpoint}, 130, 20);
  EXPECT_TRUE(JsonOf(row).contains("efficiency"));
  row.bound_us = std::numeric_limits<double>::infinity();
  EXPECT_FALSE(JsonOf(row).contains("efficiency"));
}

}  // namespace offload_table_test
}  // namespace pinion
