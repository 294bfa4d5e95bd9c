#include "pinion/programs/plan_drawing.h"

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/explain_plan.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/tests/engine/planner/small_steps.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace plan_drawing_test {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

constexpr uint64_t kSize = 10 << 10;  // 10.24 us on the link

// Two objects: uses 0 1 | 1 0, with 10 us of compute each time. Object 0 is offloaded at the turn.
StepTrace TwoObjects() { return ForwardAndBackward(kSize, {1, 2}); }
StepPlan Plan() {
  StepPlan plan;
  plan.moves = {{.object = 0, .evict_at = 1, .fetch_at = 3, .read_at = 3}};
  return plan;
}
PlanTimeline Timeline(const StepPlan& plan = Plan(), uint64_t limit_bytes = 3 * kSize / 2) {
  return TimelineOf(TwoObjects(), plan, RoundLink(), limit_bytes).value();
}

std::vector<double> Ends(const std::vector<PlanTimeline::Slice>& slices) {
  std::vector<double> ends;
  for (const PlanTimeline::Slice& slice : slices) {
    ends.push_back(slice.begin_us);
    ends.push_back(slice.end_us);
  }
  return ends;
}

auto AreAbout(const std::vector<double>& us) {
  return ::testing::Pointwise(::testing::DoubleNear(1e-9), us);
}

TEST(PlanTimeline, ComputeAndWaitsFillTheStep) {
  const PlanTimeline timeline = Timeline();
  EXPECT_DOUBLE_EQ(timeline.step_us, 70.48);
  EXPECT_THAT(Ends(timeline.compute), AreAbout({0, 20, 30.24, 50.24, 60.48, 70.48}));
  EXPECT_THAT(Ends(timeline.waits), AreAbout({20, 30.24, 50.24, 60.48}));
}

TEST(PlanTimeline, AWaitSaysWhereItIsAndForWhichCopy) {
  const PlanTimeline timeline = Timeline();
  ASSERT_THAT(timeline.waits, SizeIs(2));
  EXPECT_EQ(timeline.waits[0].what, "access 1 waits 0.010 ms for the copy out of object 0, 10 KiB");
  EXPECT_EQ(timeline.waits[1].what, "access 3 waits 0.010 ms for the copy in of object 0, 10 KiB");
}

TEST(PlanTimeline, CopiesLastFromWhenTheLinkTakesThemUntilTheyAreDone) {
  StepPlan plan = Plan();
  plan.moves.push_back(
      {.object = 1, .evict_at = 2, .fetch_at = StepMove::kNever, .read_at = StepMove::kNever});
  const PlanTimeline timeline = Timeline(plan);
  EXPECT_THAT(Ends(timeline.copies_out), AreAbout({20, 30.24, 40.24, 50.48}));
  EXPECT_THAT(Ends(timeline.copies_in), AreAbout({60.48, 70.72}));
}

TEST(PlanTimeline, ACopyBeginsWhenTheOneBeforeItIsDone) {
  StepPlan plan = Plan();
  plan.moves[0].evict_at = 2;
  plan.moves.push_back(
      {.object = 1, .evict_at = 2, .fetch_at = StepMove::kNever, .read_at = StepMove::kNever});
  EXPECT_THAT(Ends(Timeline(plan).copies_out), AreAbout({20, 30.24, 30.24, 40.48}));
}

TEST(PlanTimeline, AnObjectIsThereBeforeItGoesAndAfterItHasComeBack) {
  const PlanTimeline timeline = Timeline();
  ASSERT_THAT(timeline.objects, SizeIs(2));
  EXPECT_THAT(Ends(timeline.objects[0].there), AreAbout({0, 30.24, 50.24, 70.48}));
  EXPECT_THAT(Ends(timeline.objects[1].there), AreAbout({10, 50.24}));
}

TEST(PlanTimeline, WhatMovesSaysWhenItIsReadNextAndWhatWouldBeTooMuch) {
  const PlanTimeline timeline = Timeline();
  EXPECT_TRUE(timeline.objects[0].moves);
  EXPECT_EQ(timeline.objects[0].why,
            "object 0, 10 KiB: away behind access 1 until access 3, its next read is "
            "access 3; if it "
            "stayed, 5 KiB too much before access 2");
}

TEST(PlanTimeline, WhatStaysSaysWhy) {
  StepTrace step = TwoObjects();
  step.objects[0].frees = false;
  const PlanTimeline timeline = TimelineOf(step, StepPlan(), RoundLink(), 2 * kSize).value();
  EXPECT_FALSE(timeline.objects[0].moves);
  EXPECT_EQ(timeline.objects[0].why,
            "object 0, 10 KiB: stays, referenced by the program, so moving it frees nothing");
  EXPECT_EQ(timeline.objects[1].why,
            "object 1, 10 KiB: stays, in use as long as the step needs it");
}

TEST(PlanTimeline, WhatIsNeverReadAgainSaysSo) {
  StepPlan plan;
  plan.moves = {{.object = 1, .evict_at = 3, .fetch_at = StepMove::kNever, .copies_out = false}};
  const PlanTimeline timeline = Timeline(plan);
  EXPECT_THAT(timeline.objects[1].why, HasSubstr("away behind access 3, not read any more"));
  EXPECT_THAT(timeline.copies_out, IsEmpty());
  EXPECT_THAT(timeline.copies_in, IsEmpty());
}

TEST(PlanTimeline, TheDevicesBytesAreThoseOfEachInterval) {
  std::vector<uint64_t> bytes;
  for (const PlanTimeline::Bytes& at : Timeline().device) bytes.push_back(at.bytes / kSize);
  EXPECT_THAT(bytes, ElementsAre(1, 2, 1, 1, 1));
}

TEST(PlanTimeline, AMoveThatIsImpossibleHasNone) {
  StepPlan plan = Plan();
  plan.moves[0].object = 7;
  EXPECT_THAT(TimelineOf(TwoObjects(), plan, RoundLink(), kSize),
              StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(PlanTimeline, TheTraceHasRowsWaitsReasonsAndTheDevicesBytes) {
  EXPECT_THAT(ChromeTraceOf(Timeline()),
              AllOf(HasSubstr("\"copies out\""), HasSubstr("access 3 waits 0.010 ms"),
                    HasSubstr("if it stayed, 5 KiB too much"), HasSubstr("\"bytes\":20480"),
                    HasSubstr("\"stays\":[\"object 1, 10 KiB: stays, in use as "
                              "long as the step needs it\"]")));
}

TEST(PlanTimeline, ThePictureHasLanesReasonsAndTheTarget) {
  EXPECT_THAT(SvgOf(Timeline(), "within <15 KiB>"),
              AllOf(HasSubstr("<svg "), HasSubstr("within &lt;15 KiB&gt;"), HasSubstr("copies in"),
                    HasSubstr("<title>access 1 waits"), HasSubstr("if it stayed, 5 KiB too much"),
                    HasSubstr("stays, in use as long"), HasSubstr(">15 KiB</text>"),
                    Not(HasSubstr("nan"))));
}

TEST(PlanTimeline, AStepThatTakesNoTimeHasAPicture) {
  StepTrace step = TwoObjects();
  for (StepInterval& interval : step.intervals) interval.compute_us = 0;
  const PlanTimeline timeline = TimelineOf(step, StepPlan(), RoundLink(), 0).value();
  EXPECT_THAT(SvgOf(timeline, ""), AllOf(HasSubstr("</svg>"), Not(HasSubstr("nan"))));
}

TEST(DrawPlan, DrawsThePlannedStepWithItsNote) {
  const PlannedStep planned = {.step = TwoObjects(),
                               .plan = Plan(),
                               .link = RoundLink(),
                               .limit_bytes = 3 * kSize / 2,
                               .note = "a note"};
  EXPECT_THAT(DrawPlan(planned, PlanDrawing::kSvg),
              AllOf(HasSubstr("0.070 ms (modelled)"), HasSubstr("a note"), HasSubstr("</svg>")));
  EXPECT_THAT(DrawPlan(planned, PlanDrawing::kChromeTrace),
              AllOf(HasSubstr("planned step, a note"), HasSubstr("traceEvents")));
}

TEST(DrawPlan, AMoveThatIsImpossibleIsSaidInWords) {
  PlannedStep planned = {.step = TwoObjects(), .plan = Plan(), .link = RoundLink()};
  planned.plan.moves[0].object = 7;
  for (const PlanDrawing drawing : {PlanDrawing::kSvg, PlanDrawing::kChromeTrace}) {
    EXPECT_EQ(DrawPlan(planned, drawing), ExplainPlan(planned));
  }
}

}  // namespace plan_drawing_test
}  // namespace pinion::testing
