#include "pinion/engine/planner/explain_plan.h"

#include <cstdint>
#include <limits>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/tests/engine/planner/small_steps.h"

namespace pinion {
namespace explain_plan_test {

using ::pinion::testing::ForwardAndBackward;
using ::pinion::testing::RoundLink;
using ::testing::HasSubstr;
using ::testing::Not;

// Two objects are made and read in reverse; 10 us of compute each time, and 10.24 on the link.
StepTrace TwoObjects() {
  return ForwardAndBackward({{.size_bytes = 10 << 10}, {.size_bytes = 10 << 10}});
}

constexpr StepMove kMove = {.object = 0, .evict_at = 1, .fetch_at = 3, .read_at = 3};

TEST(ExplainPlan, SaysWhatMovesWhenAndWhatWaits) {
  const StepPlan plan = {.moves = {kMove}, .peak_bytes = 20 << 10};
  EXPECT_EQ(ExplainPlan(TwoObjects(), plan, RoundLink()),
            "0.070 ms (modelled), 1.410 x the compute alone (0.050 ms), within 20 KiB; 1 of 2 "
            "objects move, 10 KiB of 20 KiB\n"
            "stalls: 0.010 ms for copies out, 0.010 ms for copies in\n"
            "  object       size   made    out, ms   gone   back   read     in, ms\n"
            "       0     10 KiB      0      0.030      1      3      3      0.060\n");
}

TEST(ExplainPlan, AStepOfWhichNothingMovesHasNoTable) {
  const StepPlan plan = {.moves = {}, .peak_bytes = 20 << 10};
  EXPECT_EQ(ExplainPlan(TwoObjects(), plan, RoundLink()),
            "0.050 ms (modelled), 1.000 x the compute alone (0.050 ms), within 20 KiB; 0 of 2 "
            "objects move, 0 B of 20 KiB\n"
            "stalls: 0.000 ms for copies out, 0.000 ms for copies in\n");
}

TEST(ExplainPlan, WhatNeverComesBackIsSaidSo) {
  const StepPlan plan = {
      .moves = {{.object = 1, .evict_at = 3, .fetch_at = StepMove::kNever, .copies_out = false}}};
  EXPECT_THAT(ExplainPlan(TwoObjects(), plan, RoundLink()),
              HasSubstr("       1     10 KiB      1          -      3  never  never          -\n"));
}

TEST(ExplainPlan, WhatIsComputedAgainDoesNotMove) {
  StepTrace step = TwoObjects();
  step.objects[0].recast_us = 3;
  StepPlan plan = {.moves = {kMove}};
  plan.moves[0].copies_out = false;
  const std::string text = ExplainPlan(step, plan, RoundLink());
  EXPECT_THAT(text, HasSubstr("; 0 of 2 objects move, 0 B of 20 KiB\n"));
  EXPECT_THAT(text, HasSubstr("recast: 1, 10 KiB\n"));
  EXPECT_THAT(text,
              HasSubstr("       0     10 KiB      0          -      1      3      3      0.043\n"));
}

TEST(ExplainPlan, SegmentsInsideOfOneThatIsComputedAgainAreNotCounted) {
  StepTrace step = TwoObjects();
  step.segments.resize(5);
  step.segments[1].outer = step.segments[2].outer = 0;
  step.segments[4].outer = 3;
  for (const size_t i : {0, 1, 2, 4}) step.segments[i].is_recomputed = true;
  EXPECT_THAT(ExplainPlan(step, StepPlan(), RoundLink()),
              HasSubstr("segments recomputed: 2 of 3 (0, 4)\n"));
}

TEST(ExplainPlan, TimesOfTheHostsClockAreCalledThat) {
  StepTrace step = TwoObjects();
  EXPECT_THAT(ExplainPlan(step, StepPlan(), RoundLink()), Not(HasSubstr("clock")));
  step.timed_by_host = true;
  EXPECT_THAT(ExplainPlan(step, StepPlan(), RoundLink()), HasSubstr("by the host's clock"));
}

TEST(ExplainPlan, WithoutALinkItSaysWhatIsMissing) {
  EXPECT_THAT(ExplainPlan(TwoObjects(), StepPlan(), LinkCalibration()), HasSubstr("d2h.gb_per_s"));
}

TEST(ExplainPlan, ANoteStandsBelow) {
  const PlannedStep planned = {.step = TwoObjects(), .link = RoundLink(), .note = "a note"};
  EXPECT_EQ(ExplainPlan(planned),
            ExplainPlan(planned.step, planned.plan, planned.link) + "  a note\n");
}

// It returns no status: the text is the error.
TEST(ExplainPlan, WhatIsNoStepNoMoveOrNoLinkIsSaid) {
  StepTrace no_intervals = TwoObjects();
  no_intervals.intervals.clear();
  const StepPlan impossible = {
      .moves = {{.object = 7, .evict_at = 1, .fetch_at = 3, .read_at = 3}}};
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const StepPlan moves = {.moves = {kMove}};
  const struct {
    StepTrace step;
    StepPlan plan;
    LinkCalibration link;
    const char* message;
  } rows[] = {
      {no_intervals, {}, RoundLink(), "0 intervals"},
      {TwoObjects(), impossible, RoundLink(), "object 7 cannot be copied"},
      {TwoObjects(), moves, RoundLink(1, nan), "fixed_us is nan; it must be finite"},
      {TwoObjects(), moves, RoundLink(1, infinity), "fixed_us is inf; it must be finite"},
      {TwoObjects(), moves, RoundLink(1, -1), "fixed_us is -1; it must be finite"},
      {TwoObjects(), moves, RoundLink(nan), "duplex_gb_per_s is nan"},
  };
  for (const auto& row : rows) {
    EXPECT_THAT(ExplainPlan(row.step, row.plan, row.link), HasSubstr(row.message));
  }
}

}  // namespace explain_plan_test
}  // namespace pinion
