#include "pinion/engine/planner/step_trace.h"

#include <cmath>
#include <limits>
#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::testing::HasSubstr;

// Two saved tensors, read in reverse.
StepRecord TwoTensors() {
  StepRecord step;
  step.objects = {{.size_bytes = 100}, {.size_bytes = 200}};
  step.uses = {0, 1, 1, 0};
  step.stretches = {{.compute_us = 1}, {.compute_us = 2}, {}, {.compute_us = 3}, {.compute_us = 4}};
  return step;
}

void ExpectRefused(const StepRecord& step, const std::string& text) {
  EXPECT_THAT(step.Validate(), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
}

TEST(StepRecordTest, AStepOfTwoTensorsIsValid) { EXPECT_THAT(TwoTensors().Validate(), IsOk()); }

TEST(StepRecordTest, AStepWithoutObjectsIsOneStretch) {
  StepRecord step;
  step.stretches = {{.compute_us = 5}};
  EXPECT_THAT(step.Validate(), IsOk());
  ExpectRefused(StepRecord(), "there are 0 stretches around 0 uses");
}

TEST(StepRecordTest, ComputeIsTheSumOfAllStretches) {
  EXPECT_DOUBLE_EQ(TwoTensors().compute_us(), 10);
}

TEST(StepRecordTest, RefusesAnObjectWithoutBytes) {
  StepRecord step = TwoTensors();
  step.objects[1].size_bytes = 0;
  ExpectRefused(step, "object 1 has 0 bytes: leave it out");
}

TEST(StepRecordTest, RefusesATimeToComputeAgainThatIsNone) {
  StepRecord step = TwoTensors();
  step.objects[1].recompute_us = 0;
  EXPECT_THAT(step.Validate(), IsOk());
  for (const double us : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    step.objects[1].recompute_us = us;
    ExpectRefused(step, "object 1 cannot be computed again in");
  }
}

TEST(StepRecordTest, RefusesAUseOfAnObjectThatThereIsNot) {
  StepRecord step = TwoTensors();
  step.uses[3] = 2;
  ExpectRefused(step, "use 3 is of object 2, but there are 2");
}

TEST(StepRecordTest, RefusesObjectsThatAreNotNumberedByTheirFirstUses) {
  StepRecord step = TwoTensors();
  step.uses = {1, 0, 0, 1};
  ExpectRefused(step, "use 0 is the first of object 1, and object 0 has not been used yet");
}

TEST(StepRecordTest, RefusesAnObjectThatIsNeverUsed) {
  StepRecord step = TwoTensors();
  step.objects.push_back({.size_bytes = 1});
  ExpectRefused(step, "object 2 is never used");
}

TEST(StepRecordTest, RefusesStretchesThatDoNotSurroundTheUses) {
  StepRecord step = TwoTensors();
  step.stretches.pop_back();
  ExpectRefused(step, "there are 4 stretches around 4 uses");
}

TEST(StepRecordTest, AnOperatorForEachUseIsValid) {
  StepRecord step = TwoTensors();
  step.operators = {9, 9, 4, 9};
  EXPECT_THAT(step.Validate(), IsOk());
}

TEST(StepRecordTest, RefusesOperatorsThatAreNotThoseOfTheUses) {
  StepRecord step = TwoTensors();
  step.operators = {1, 2, 3};
  ExpectRefused(step, "there are 3 operators for 4 uses");
  step.operators = {1, 2, 3, 4, 5};
  ExpectRefused(step, "there are 5 operators for 4 uses");
}

TEST(StepRecordTest, ReadsOfABackwardThatMakesAGraphAreAscendingUses) {
  StepRecord step = TwoTensors();
  step.graph_reads = {2, 3};
  EXPECT_THAT(step.Validate(), IsOk());
  step.graph_reads = {3, 2};
  ExpectRefused(step, "read 1 of a backward that makes a graph is use 2");
  step.graph_reads = {4};
  ExpectRefused(step, "is use 4, and the step has 4 uses");
}

TEST(StepRecordTest, RefusesComputeThatIsNoTime) {
  StepRecord step = TwoTensors();
  for (const double us : {-0.5, std::nan(""), std::numeric_limits<double>::infinity()}) {
    step.stretches[4].compute_us = us;
    ExpectRefused(step, "stretch 4 cannot take");
  }
}

TEST(StepRecordTest, SegmentsHaveUsesAndInputsOfTheStep) {
  StepRecord step = TwoTensors();
  step.segments = {{.uses = {1, 2}, .inputs = {0}}};
  EXPECT_THAT(step.Validate(), IsOk());
  step.segments = {{.uses = {2, 1}, .inputs = {}}};
  ExpectRefused(step, "segment 0 has use 1 as its number 1, and the step has 4 uses");
  step.segments = {{}, {.uses = {1, 4}, .inputs = {}}};
  ExpectRefused(step, "segment 1 has use 4 as its number 1");
  step.segments = {{.uses = {}, .inputs = {2}}};
  ExpectRefused(step, "segment 0 needs object 2, but there are 2");
}

TEST(StepRecordTest, ASegmentIsInsideOfOneThatBeganBeforeItAndHasItsUses) {
  StepRecord step = TwoTensors();
  step.segments = {{.uses = {0, 1, 2}, .inputs = {}}, {.uses = {1, 2}, .inputs = {}}};
  step.segments[1].outer = 0;
  EXPECT_THAT(step.Validate(), IsOk());
  step.segments[0].uses = {0, 1};
  ExpectRefused(step, "segment 1 has uses that segment 0 does not have");
  step.segments[1].outer = 1;
  ExpectRefused(step, "segment 1 is inside of segment 1, which has to begin before it");
}

TEST(StepRecordTest, InsideIsAtAnyDepth) {
  std::vector<StepSegment> segments(5);
  segments[1].outer = segments[3].outer = 0;
  segments[2].outer = 1;
  EXPECT_TRUE(IsInside(segments, 1, 0));
  EXPECT_TRUE(IsInside(segments, 2, 0));
  EXPECT_TRUE(IsInside(segments, 2, 1));
  EXPECT_FALSE(IsInside(segments, 0, 1));
  EXPECT_FALSE(IsInside(segments, 3, 1));
  EXPECT_FALSE(IsInside(segments, 4, 0));
  EXPECT_FALSE(IsInside(segments, 0, 0));
}

}  // namespace
}  // namespace pinion::testing
