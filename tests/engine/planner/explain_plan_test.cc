#include "pinion/engine/planner/explain_plan.h"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/plan_step.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/tests/engine/planner/small_steps.h"

namespace pinion {
namespace explain_plan_test {

using ::pinion::testing::ForwardAndBackward;
using ::pinion::testing::RoundLink;
using ::testing::_;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::EndsWith;
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
            "       0     10 KiB      0      0.030      1      3      3      0.060\n"
            "stay: 1 of 2 objects, 10 KiB of 20 KiB\n"
            "       1     10 KiB  in use as long as the step needs it\n"
            "  object       size   made   read\n"
            "       1     10 KiB      1      2  in use as long as the step needs it\n");
}

TEST(ExplainPlan, AStepOfWhichNothingMovesHasNoTableOfMoves) {
  const StepPlan plan = {.moves = {}, .peak_bytes = 20 << 10};
  EXPECT_EQ(ExplainPlan(TwoObjects(), plan, RoundLink()),
            "0.050 ms (modelled), 1.000 x the compute alone (0.050 ms), within 20 KiB; 0 of 2 "
            "objects move, 0 B of 20 KiB\n"
            "stalls: 0.000 ms for copies out, 0.000 ms for copies in\n"
            "stay: 2 of 2 objects, 20 KiB of 20 KiB\n"
            "       1     10 KiB  there is room for it\n"
            "       1     10 KiB  in use as long as the step needs it\n"
            "  object       size   made   read\n"
            "       0     10 KiB      0      3  there is room for it\n"
            "       1     10 KiB      1      2  in use as long as the step needs it\n");
}

TEST(ExplainPlan, WhatStaysIsSummedByReasonAndTheTenLargestFollow) {
  std::vector<StepObject> objects(12, {.size_bytes = 10 << 10});
  objects[2] = {.size_bytes = 200 << 10, .frees = false};
  objects[3].size_bytes = 30 << 10;
  StepTrace step = ForwardAndBackward(objects);
  step.accesses.back() = 1;  // object 0 is not read
  const std::string text = ExplainPlan(step, StepPlan(), RoundLink());
  const std::string line = "  in use as long as the step needs it\n";
  EXPECT_THAT(text, EndsWith("stay: 12 of 12 objects, 330 KiB of 330 KiB\n"
                             "       1    200 KiB  referenced by the program, so moving it frees "
                             "nothing\n"
                             "      10    120 KiB  there is room for it\n"
                             "       1     10 KiB" +
                             line + text.substr(text.find("  object"))));
  EXPECT_THAT(text, HasSubstr("       2    200 KiB      2     21  referenced by the program, so "
                              "moving it frees nothing\n"
                              "       3     30 KiB      3     20  there is room for it\n"
                              "       0     10 KiB      0  never  there is room for it\n"
                              "       1     10 KiB      1     23  there is room for it\n"));
  EXPECT_THAT(text, EndsWith("       9     10 KiB      9     14  there is room for it\n"
                             "  and 2 more\n"));
}

// Accesses: 0 1 2 | 2 1 0.
TEST(WhyObjectsStay, EachReasonIsToldApart) {
  constexpr char kRoom[] = "there is room for it";
  constexpr char kInUse[] = "in use as long as the step needs it";
  const auto why = [](const StepObject& object, const StepPlan& plan = {}) {
    const StepObject other = {.size_bytes = 10 << 10};
    return WhyObjectsStay(ForwardAndBackward({object, other, other}), plan);
  };
  const uint64_t size_bytes = 10 << 10;
  EXPECT_THAT(why({.size_bytes = size_bytes}), ElementsAre(kRoom, kRoom, kInUse));
  EXPECT_THAT(
      why({.size_bytes = size_bytes}, {.moves = {{.evict_at = 1, .fetch_at = 4, .read_at = 5}}}),
      ElementsAre("", kRoom, kInUse));
  EXPECT_THAT(why({.size_bytes = size_bytes, .frees = false}),
              ElementsAre("referenced by the program, so moving it frees nothing", kRoom, kInUse));
  EXPECT_THAT(why({.size_bytes = size_bytes, .held_until = 3}), ElementsAre(kRoom, kRoom, kInUse));
  EXPECT_THAT(why({.size_bytes = size_bytes, .held_until = 5}),
              ElementsAre("referenced by the program until it is read", kRoom, kInUse));
  EXPECT_THAT(
      why({.size_bytes = size_bytes, .saved_until = 5}),
      ElementsAre("saved again by a later operator, and in use from then on", kRoom, kInUse));
}

// All three objects are on the device in intervals 2 and 3. Other bytes decide which one is the
// peak.
TEST(WhyObjectsStay, OfAPlanForASlowdownWhatIsIdleAtThePeakWouldMakeTheStepSlower) {
  constexpr char kSlower[] = "with less memory the step would be slower than kAutoTarget allows";
  StepTrace step = ForwardAndBackward(10 << 10, {1, 2, 3});
  StepPlan plan = {.moves = {}, .peak_bytes = 40 << 10, .less_is_slower = true};
  step.intervals[3].other_bytes = 10 << 10;
  EXPECT_THAT(WhyObjectsStay(step, plan), ElementsAre(kSlower, kSlower, _));
  plan.less_is_slower = false;
  EXPECT_THAT(WhyObjectsStay(step, plan), Each(Not(kSlower)));
  plan.less_is_slower = true;
  step.intervals[3].other_bytes = 0;
  for (const size_t peak : {0, 6}) {  // nothing is idle there
    step.intervals[peak].other_bytes = 30 << 10;
    EXPECT_THAT(WhyObjectsStay(step, plan), Each(Not(kSlower)));
    step.intervals[peak].other_bytes = 0;
  }
}

TEST(WhyObjectsStay, OfPlansForASlowdownThoseOfTheLeastMemoryAreNotSlowerWithLess) {
  StepTrace step = ForwardAndBackward(10 << 10, {1, 2, 3});
  EXPECT_TRUE(PlanStepWithoutTarget(step, RoundLink())->less_is_slower);
  for (StepInterval& interval : step.intervals) interval.compute_us = 1e6;  // hides the copies
  EXPECT_FALSE(PlanStepWithoutTarget(step, RoundLink())->less_is_slower);
}

TEST(WhyObjectsStayDeathTest, WhatIsNoStepOrNoMoveIsNamed) {
  StepTrace no_intervals = TwoObjects();
  no_intervals.intervals.clear();
  EXPECT_DEATH((void)WhyObjectsStay(no_intervals, StepPlan()), "there are 0 intervals around");
  const StepPlan impossible = {
      .moves = {{.object = 7, .evict_at = 1, .fetch_at = 3, .read_at = 3}}};
  EXPECT_DEATH((void)WhyObjectsStay(TwoObjects(), impossible),
               "object 7 cannot be copied .* the step has 2 objects");
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
