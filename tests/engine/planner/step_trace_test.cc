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
StepTrace TwoTensors() {
  StepTrace step;
  step.objects = {{.size_bytes = 100}, {.size_bytes = 200}};
  step.accesses = {0, 1, 1, 0};
  step.intervals = {{.compute_us = 1}, {.compute_us = 2}, {}, {.compute_us = 3}, {.compute_us = 4}};
  return step;
}

void ExpectRefused(const StepTrace& step, const std::string& text) {
  EXPECT_THAT(step.Validate(), StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
}

TEST(StepTraceTest, AStepOfTwoTensorsIsValid) { EXPECT_THAT(TwoTensors().Validate(), IsOk()); }

TEST(StepTraceTest, AStepWithoutObjectsIsOneInterval) {
  StepTrace step;
  ExpectRefused(step, "there are 0 intervals around 0 accesses");
  step.intervals = {{.compute_us = 5}};
  EXPECT_THAT(step.Validate(), IsOk());
}

TEST(StepTraceTest, ComputeIsTheSumOfAllIntervals) {
  EXPECT_DOUBLE_EQ(TwoTensors().compute_us(), 10);
}

TEST(StepTraceTest, RefusesARecastTimeThatIsNone) {
  StepTrace step = TwoTensors();
  step.objects[1].recast_us = 0;
  EXPECT_THAT(step.Validate(), IsOk());
  for (const double us : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    step.objects[1].recast_us = us;
    ExpectRefused(step, "object 1 cannot be computed again in");
  }
}

TEST(StepTraceTest, RefusesObjectsAccessesAndIntervalsThatDoNotFit) {
  const struct {
    void (*spoil)(StepTrace&);
    const char* message;
  } rows[] = {
      {[](StepTrace& step) { step.objects[1].size_bytes = 0; },
       "object 1 has 0 bytes: leave it out"},
      {[](StepTrace& step) { step.accesses[3] = 2; }, "access 3 is of object 2, but there are 2"},
      {[](StepTrace& step) {
         step.accesses = {1, 0, 0, 1};
       },
       "access 0 is the first of object 1, and object 0 has not been used yet"},
      {[](StepTrace& step) { step.objects.push_back({.size_bytes = 1}); },
       "object 2 is never used"},
      {[](StepTrace& step) { step.intervals.pop_back(); },
       "there are 4 intervals around 4 accesses"},
      {[](StepTrace& step) {
         step.operators = {1, 2, 3};
       },
       "there are 3 operators for 4 accesses"},
      {[](StepTrace& step) {
         step.operators = {1, 2, 3, 4, 5};
       },
       "there are 5 operators for 4 accesses"},
  };
  for (const auto& row : rows) {
    StepTrace step = TwoTensors();
    row.spoil(step);
    ExpectRefused(step, row.message);
  }
}

TEST(StepTraceTest, AnOperatorForEachAccessIsValid) {
  StepTrace step = TwoTensors();
  step.operators = {9, 9, 4, 9};
  EXPECT_THAT(step.Validate(), IsOk());
}

TEST(StepTraceTest, ReadsOfABackwardThatMakesAGraphAreAscendingAccesses) {
  StepTrace step = TwoTensors();
  step.graph_reads = {2, 3};
  EXPECT_THAT(step.Validate(), IsOk());
  step.graph_reads = {3, 2};
  ExpectRefused(step, "read 1 of a backward that makes a graph is access 2");
  step.graph_reads = {4};
  ExpectRefused(step, "is access 4, and the step has 4 accesses");
}

TEST(StepTraceTest, RefusesComputeThatIsNoTime) {
  StepTrace step = TwoTensors();
  for (const double us : {-0.5, std::nan(""), std::numeric_limits<double>::infinity()}) {
    step.intervals[4].compute_us = us;
    ExpectRefused(step, "interval 4 cannot take");
  }
}

TEST(StepTraceTest, SegmentsHaveAccessesAndInputsOfTheStep) {
  StepTrace step = TwoTensors();
  step.segments = {{.accesses = {1, 2}, .inputs = {0}}};
  EXPECT_THAT(step.Validate(), IsOk());
  step.segments = {{.accesses = {2, 1}, .inputs = {}}};
  ExpectRefused(step, "segment 0 has access 1 as its number 1, and the step has 4 accesses");
  step.segments = {{}, {.accesses = {1, 4}, .inputs = {}}};
  ExpectRefused(step, "segment 1 has access 4 as its number 1");
  step.segments = {{.accesses = {}, .inputs = {2}}};
  ExpectRefused(step, "segment 0 needs object 2, but there are 2");
}

TEST(StepTraceTest, ASegmentIsInsideOfOneThatBeganBeforeItAndHasItsAccesses) {
  StepTrace step = TwoTensors();
  step.segments = {{.accesses = {0, 1, 2}, .inputs = {}}, {.accesses = {1, 2}, .inputs = {}}};
  step.segments[1].outer = 0;
  EXPECT_THAT(step.Validate(), IsOk());
  step.segments[0].accesses = {0, 1};
  ExpectRefused(step, "segment 1 has accesses that segment 0 does not have");
  step.segments[1].outer = 1;
  ExpectRefused(step, "segment 1 is inside of segment 1, which has to begin before it");
}

TEST(StepTraceTest, TakesTheMostOfTwoRecordsInEachIntervalAndOfNoneBefore) {
  const auto recorded = [](StepInterval interval) {
    StepTrace step = TwoTensors();
    step.intervals[1] = interval;
    return step;
  };
  const StepTrace first = recorded({.other_bytes = 70, .transient_bytes = 10});
  StepTrace second = recorded({.compute_us = 5, .other_bytes = 50, .transient_bytes = 40});
  StepTrace third = recorded({.other_bytes = 60, .released_bytes = 20});
  second.TakeMostOf(first);
  EXPECT_EQ(second.intervals[1].other_bytes, 70u);
  EXPECT_EQ(second.intervals[1].peak_other_bytes(), 90u);
  EXPECT_EQ(second.intervals[1].compute_us, 5) << "the last record tells the time";
  third.TakeMostOf(second.WithMore(1000));
  EXPECT_EQ(third.intervals[1].other_bytes, 60u) << "without what the first one had";
  EXPECT_EQ(third.intervals[1].peak_other_bytes(), 90u);
  third.TakeMostOf(first.WithMore(1000));
  EXPECT_EQ(third.intervals[1].other_bytes, 70u) << "as the first one was recorded";
  StepTrace last = recorded({.other_bytes = 30, .released_bytes = 20});
  last.TakeMostOf(recorded({.other_bytes = 30, .released_bytes = 5}));
  EXPECT_EQ(last.intervals[1].peak_other_bytes(), 25u) << "below what is there at the end";
}

// Accesses 0 1 | 1 0.
TEST(StepTraceTest, RoomForAGrowthRaisesTheIntervalThatLacksItAndLasts) {
  StepTrace step = TwoTensors();
  step.intervals[1].other_bytes = 50;
  step.intervals[2] = {.other_bytes = 60, .transient_bytes = 10};
  const uint64_t size_bytes = step.objects[1].size_bytes;
  step.LeaveRoom({.access = 0, .size_bytes = size_bytes + 400});
  EXPECT_EQ(step.intervals[1].peak_other_bytes(), step.intervals[0].other_bytes + 400)
      << "the access makes the object";
  step.LeaveRoom({.access = 1, .size_bytes = 20});
  EXPECT_EQ(step.intervals[2].peak_other_bytes(), 70u) << "as recorded";
  step.LeaveRoom({.access = 1, .size_bytes = 300});
  step.LeaveRoom({.access = 1, .size_bytes = 200});
  EXPECT_EQ(step.intervals[2].peak_other_bytes(), 350u);
  EXPECT_EQ(step.intervals[2].other_bytes, 60u);
  EXPECT_EQ(step.growths[1], 300u);

  StepTrace next = TwoTensors();
  next.TakeMostOf(step);
  EXPECT_EQ(next.intervals[2].peak_other_bytes(), 350u);
  StepTrace last = TwoTensors();
  last.TakeMostOf(next);
  EXPECT_EQ(last.intervals[2].peak_other_bytes(), 300u) << "beside what the last two records had";
  last.LeaveRoom({.access = 3, .size_bytes = 90});
  EXPECT_EQ(last.intervals[4].peak_other_bytes(), last.intervals[3].other_bytes + 90);
}

// Metrics in every fourth step, for example, of which only some are recorded.
TEST(StepTraceTest, WhatARecordGrowsByMoreThanTheOneBeforeLastsAndWhatOnlyTheFirstGrowsByDoesNot) {
  const auto recorded = [](uint64_t transient_bytes) {
    StepTrace step = TwoTensors();
    step.intervals[2].transient_bytes = transient_bytes;
    return step;
  };
  const auto after = [&](const std::vector<uint64_t>& records) {
    StepTrace step = recorded(records.front());
    for (size_t i = 1; i < records.size(); ++i) {
      StepTrace next = recorded(records[i]);
      next.TakeMostOf(step);
      step = next;
    }
    return step.intervals[2].peak_other_bytes();
  };
  EXPECT_EQ(after({900, 10, 10}), 10u);
  EXPECT_EQ(after({10, 900, 10, 10, 10}), 900u);
  EXPECT_EQ(after({900, 10, 300, 10, 10}), 300u);
}

TEST(StepTraceTest, InsideIsAtAnyDepth) {
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
