#include "pinion/engine/plan/explain_plan.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/plan/link_calibration.h"
#include "pinion/engine/plan/step_plan.h"
#include "pinion/engine/plan/step_record.h"

namespace pinion {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// 1 GB/s: 1000 bytes in a microsecond.
LinkCalibration Link() {
  LinkCalibration link;
  link.d2h = {.gb_per_s = 1};
  link.h2d = {.gb_per_s = 1};
  link.d2h_duplex_gb_per_s = 1;
  link.h2d_duplex_gb_per_s = 1;
  return link;
}

// Two objects are made and read in reverse; 10 us of compute each time, and 10.24 on the link.
StepRecord TwoObjects() {
  StepRecord step;
  step.objects = {{.size_bytes = 10 << 10}, {.size_bytes = 10 << 10}};
  step.uses = {0, 1, 1, 0};
  step.stretches.assign(5, {.compute_us = 10});
  return step;
}

TEST(ExplainPlan, SaysWhatMovesWhenAndWhatWaits) {
  StepPlan plan;
  plan.moves = {{.object = 0, .drop_at = 1, .fetch_at = 3, .read_at = 3}};
  plan.peak_bytes = 20 << 10;
  EXPECT_EQ(ExplainPlan(TwoObjects(), plan, Link()),
            "0.070 ms (modelled), 1.410 x the compute alone (0.050 ms), within 20 KiB; 1 of 2 "
            "objects move, 10 KiB of 20 KiB\n"
            "stalls: 0.010 ms for copies out, 0.010 ms for copies in\n"
            "  object       size   made    out, ms   gone   back   read     in, ms\n"
            "       0     10 KiB      0      0.030      1      3      3      0.060\n");
}

TEST(ExplainPlan, AStepOfWhichNothingMovesHasNoTable) {
  StepPlan plan;
  plan.peak_bytes = 20 << 10;
  EXPECT_EQ(ExplainPlan(TwoObjects(), plan, Link()),
            "0.050 ms (modelled), 1.000 x the compute alone (0.050 ms), within 20 KiB; 0 of 2 "
            "objects move, 0 B of 20 KiB\n"
            "stalls: 0.000 ms for copies out, 0.000 ms for copies in\n");
}

TEST(ExplainPlan, WhatNeverComesBackIsSaidSo) {
  StepPlan plan;
  plan.moves = {{.object = 1, .drop_at = 3, .fetch_at = StepMove::kNever, .copies_out = false}};
  EXPECT_THAT(ExplainPlan(TwoObjects(), plan, Link()),
              HasSubstr("       1     10 KiB      1          -      3  never  never          -\n"));
}

TEST(ExplainPlan, TimesOfTheHostsClockAreCalledThat) {
  StepRecord step = TwoObjects();
  EXPECT_THAT(ExplainPlan(step, StepPlan(), Link()), Not(HasSubstr("clock")));
  step.timed_by_host = true;
  EXPECT_THAT(ExplainPlan(step, StepPlan(), Link()), HasSubstr("by the host's clock"));
}

TEST(ExplainPlan, WithoutALinkItSaysWhatIsMissing) {
  EXPECT_THAT(ExplainPlan(TwoObjects(), StepPlan(), LinkCalibration()), HasSubstr("d2h.gb_per_s"));
}

}  // namespace
}  // namespace pinion
