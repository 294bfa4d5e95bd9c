#include "pinion/engine/planner/recompute_plan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/planner/liveness.h"
#include "pinion/engine/planner/plan_step.h"
#include "pinion/engine/planner/recomputation.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/tests/engine/planner/small_steps.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace recompute_plan_test {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

// WithRecomputation, of and to a valid step.
StepTrace Again(const StepTrace& step, const std::vector<uint32_t>& segments) {
  EXPECT_THAT(step.Validate(), IsOk());
  StepTrace again = WithRecomputation(step, segments);
  EXPECT_THAT(again.Validate(), IsOk());
  return again;
}

TEST(Recomputation, NothingIsLeftOfWhatASegmentAloneSaves) {
  // Uses: 0 | 1 2 | 3 | 4 5, and backward 5 4 3, 2 1 0.
  const StepTrace step = Blocks({{1000, 20, 3}, {4000, 50, 6}});
  ASSERT_THAT(step.accesses, ElementsAre(0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0));
  const StepTrace again = Again(step, {1});
  EXPECT_THAT(again.accesses, ElementsAre(0, 1, 2, 3, 3, 3, 3, 2, 1, 0))
      << "object 3 is saved, saved as an input, read by the second run, and read as before";
  EXPECT_EQ(again.objects.size(), 4u);
  EXPECT_EQ(again.objects[3].size_bytes, 4000u);
  EXPECT_EQ(again.objects[3].saved_until, 4u);
  EXPECT_THAT(again.segments, IsEmpty());
}

TEST(Recomputation, EachSegmentSavesItsInputsAndReadsThemByOperatorsOfItsOwn) {
  const StepTrace step = Blocks({{1000, 20}, {4000, 50}, {2000, 30}});
  const StepTrace again = Again(step, {0, 1, 2});
  EXPECT_THAT(again.accesses, ElementsAre(0, 0, 1, 1, 2, 2, 2, 2, 1, 1, 0, 0));
  EXPECT_THAT(again.operators, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11));
}

TEST(Recomputation, TheSecondRunTakesWhatForwardTookUntilItsLastSave) {
  StepTrace step = Blocks({{1000, 20, 3}, {4000, 50, 6}});
  for (size_t i = 0; i < step.intervals.size(); ++i) {
    step.intervals[i].compute_us = static_cast<double>(1 << i);
  }
  step.segments[1].before->compute_us = 5;
  const StepTrace again = Again(step, {1});
  std::vector<double> us;
  for (const StepInterval& interval : again.intervals) us.push_back(interval.compute_us);
  EXPECT_THAT(us,
              ElementsAre(1, 2, 4, 8, 5, 11 + 32 + 64, 11 + 32 + 128 + 256, 512, 1024, 2048, 4096))
      << "intervals 4 and 5 lie before the saves within the segment, which begins in interval 4";
}

TEST(Recomputation, WhatIsMadeAgainIsThereFromTheSecondRunUntilItIsRead) {
  StepTrace step = Blocks({{1000, 20, 3}, {4000, 50, 6}});
  step.intervals[4].transient_bytes = 700;  // an operator of the segment, before it saves anything
  step.intervals[5].transient_bytes = 10;
  const StepTrace again = Again(step, {1});
  const std::vector<int64_t> bytes = DeviceBytes(again, {});
  // Forward: all that is saved outside, and in interval 4 the segment at its peak.
  EXPECT_EQ(bytes[3], 100 + 1023 + 4000);
  EXPECT_EQ(bytes[4], 100 + 1023 + 4000) << "before it begins";
  EXPECT_EQ(bytes[5], 100 + 1023 + 4000 + 700 + 50);
  // The second run has its peak again.
  EXPECT_EQ(bytes[6], 100 + 1023 + 4000 + 700 + 50);
  EXPECT_EQ(again.intervals[6].other_bytes, 100u) << "when it ends, all of it was read";
  EXPECT_EQ(bytes[7], 100 + 1023 + 4000);
}

TEST(Recomputation, TheInputIsHeldUntilTheSegmentHasReadItForTheLastTime) {
  StepTrace step = Blocks({{1000, 20}, {4000, 50}});
  // Within the segment: the input is saved again, and its last reader belongs to that.
  step.segments[1].accesses.push_back(5);
  ASSERT_EQ(step.accesses[5], 2u);
  const StepTrace again = Again(step, {1});
  EXPECT_THAT(again.accesses, ElementsAre(0, 1, 2, 2, 2, 1, 0));
  EXPECT_EQ(DeviceBytes(again, {})[5], 100 + 1020 + 4000 + 50);
}

// Uses: 0, then a segment whose operators save 1, 2 and 3, and then their readers.
StepTrace OneSegment() {
  StepTrace step;
  step.objects = {{.size_bytes = 1000}, {.size_bytes = 20}, {.size_bytes = 500}, {.size_bytes = 3}};
  step.accesses = {0, 1, 2, 3, 3, 2, 1, 0};
  step.intervals.assign(9, {.compute_us = 10, .other_bytes = 100});
  step.segments = {{.accesses = {1, 2, 3, 4, 5, 6},
                    .inputs = {},
                    .before = StepInterval{.compute_us = 4, .other_bytes = 100}}};
  return step;
}

TEST(Recomputation, AnInputThatTheSegmentItselfSavesIsSavedWhenItBegins) {
  // Object 2 is made before the segment begins, which first saves something else.
  StepTrace step = OneSegment();
  step.segments[0].inputs = {2};
  step.intervals[1].other_bytes = step.segments[0].before->other_bytes = 600;
  const StepTrace again = Again(step, {0});
  EXPECT_THAT(again.accesses, ElementsAre(0, 1, 1, 0));
  EXPECT_EQ(again.objects[1].size_bytes, 500u);
  const std::vector<int64_t> bytes = DeviceBytes(again, {});
  EXPECT_EQ(bytes[1], 100 + 1000 + 500) << "an object instead of other bytes";
  EXPECT_EQ(again.intervals[1].compute_us, 4);
  EXPECT_EQ(again.intervals[2].compute_us, 6 + 10 + 10 + 10);
  EXPECT_EQ(again.intervals[2].other_bytes, 100u);
  EXPECT_EQ(bytes[2], 100 + 1000 + 500 + 20) << "what the segment makes goes one by one";
  EXPECT_EQ(again.intervals[3].compute_us, 6 + 10 + 10 + 10 + 10 + 10);
  EXPECT_EQ(bytes[3], 100 + 1000 + 500 + 23);
}

TEST(Recomputation, AnInputThatNobodySavesIsSavedThenAndIsNoOtherByte) {
  StepTrace step = OneSegment();
  step.unsaved_inputs = {{.size_bytes = 300, .held_until = 2}};
  step.segments[0].inputs = {4};
  step.segments[0].before->other_bytes = 400;
  step.intervals[1].other_bytes = step.intervals[2].other_bytes = 400;
  const StepTrace again = Again(step, {0});
  EXPECT_THAT(again.accesses, ElementsAre(0, 1, 1, 0));
  EXPECT_EQ(again.objects[1].size_bytes, 300u);
  EXPECT_EQ(again.objects[1].held_until, 2u) << "old intervals 1 to 4 are the new ones 1 and 2";
  const std::vector<int64_t> bytes = DeviceBytes(again, {});
  EXPECT_EQ(bytes[1], 100 + 1000 + 300);
  EXPECT_EQ(bytes[2], 100 + 1000 + 300 + 520);
  EXPECT_EQ(bytes[3], 100 + 1000 + 300 + 523);
  EXPECT_EQ(WithRecomputation(step, {}).objects.size(), step.objects.size());
}

TEST(Recomputation, AnInputOfTwoSegmentsIsOneObject) {
  StepTrace step = OneSegment();
  step.unsaved_inputs = {{.size_bytes = 300, .held_until = 3}};
  const StepInterval before = {.compute_us = 4, .other_bytes = 400};
  step.segments = {{.accesses = {1, 6}, .inputs = {4}, .before = before},
                   {.accesses = {2, 3, 4, 5}, .inputs = {4, 0}, .before = before}};
  for (const size_t interval : {1, 2, 3}) step.intervals[interval].other_bytes = 400;
  const StepTrace again = Again(step, {0, 1});
  EXPECT_THAT(again.accesses, ElementsAre(0, 1, 1, 0, 1, 0, 1, 0));
  EXPECT_THAT(again.operators, ElementsAre(0, 1, 2, 2, 3, 3, 4, 5));
  EXPECT_EQ(again.objects[1].saved_until, 2u);
  EXPECT_EQ(again.objects[0].saved_until, 3u);
  EXPECT_EQ(again.intervals[1].other_bytes, 100u);
}

TEST(Recomputation, WhatIsSavedOutsideAsWellIsSavedThereAlone) {
  StepTrace step = Blocks({{1000, 20}, {4000, 50}});
  // The next block's input is what the first one saved last.
  step.accesses = {0, 1, 1, 2, 2, 1, 1, 0};
  step.objects = {{.size_bytes = 1000}, {.size_bytes = 20, .saved_until = 2}, {.size_bytes = 50}};
  const StepInterval before = {.other_bytes = 100};
  step.segments = {{.accesses = {1, 6}, .inputs = {0}, .before = before},
                   {.accesses = {3, 4}, .inputs = {1}, .before = before}};
  step.intervals.assign(9, {.compute_us = 10, .other_bytes = 100});
  const StepTrace again = Again(step, {0});
  EXPECT_THAT(again.accesses, ElementsAre(0, 0, 1, 2, 2, 1, 0, 0));
  EXPECT_EQ(again.objects[1].size_bytes, 20u);
  EXPECT_EQ(again.objects[1].saved_until, 0u);
}

TEST(Recomputation, WhatWasComputedAgainOrIsNeverReadCannotBe) {
  StepTrace step = Blocks({{1000, 20}});
  EXPECT_THAT(RecomputableSegments(step), ElementsAre(0));
  step.segments[0].before.reset();
  EXPECT_THAT(RecomputableSegments(step), IsEmpty()) << "nobody has seen it begin";
  step.segments[0].before.emplace();
  step.segments[0].is_recomputed = true;
  EXPECT_THAT(RecomputableSegments(step), IsEmpty());
  step.segments[0] = {.accesses = {1}, .inputs = {0}, .before = StepInterval()};
  EXPECT_THAT(RecomputableSegments(step), IsEmpty());
  step.segments[0] = {};
  EXPECT_THAT(RecomputableSegments(step), IsEmpty());
  // A graph that is kept, and read by two backwards.
  step.accesses = {0, 1, 1, 1, 0};
  step.segments[0] = {.accesses = {1, 2, 3}, .inputs = {0}, .before = StepInterval()};
  EXPECT_THAT(RecomputableSegments(step), IsEmpty());
}

TEST(RecomputePlan, WhereTheLinkHasTimeNothingIsComputedAgain) {
  const StepTrace step = Blocks({{10, 20}, {10, 20}, {10, 20}});
  const RecomputePlan recompute = PlanWithRecomputation(step, 180, RoundLink()).value();
  EXPECT_THAT(recompute.segments, IsEmpty());
  EXPECT_EQ(recompute.plan.step_us, step.compute_us());
  EXPECT_THAT(recompute.plan.moves, SizeIs(::testing::Ge(1u)));
}

TEST(RecomputePlan, WhereTheLinkHasNoTimeASegmentIsComputedAgain) {
  const StepTrace step = Blocks({{10, 100'000}, {10, 100'000}, {10, 100'000}});
  const uint64_t memory_bytes = LeastMemoryBytes(step).value() + 500;
  const StepPlan without = PlanStep(step, memory_bytes, RoundLink()).value();
  const RecomputePlan recompute = PlanWithRecomputation(step, memory_bytes, RoundLink()).value();
  EXPECT_THAT(recompute.segments, ElementsAre(0, 1));
  EXPECT_EQ(recompute.plan.step_us, step.compute_us() + 20);
  EXPECT_GT(without.step_us, 300);
  EXPECT_LE(recompute.plan.peak_bytes, memory_bytes);
}

// Of the segments that are computed again, those that are inside of no other.
int64_t Wholes(const StepTrace& step, const RecomputePlan& recompute) {
  return std::count_if(recompute.segments.begin(), recompute.segments.end(),
                       [&step](uint32_t i) { return !step.segments[i].outer.has_value(); });
}

// So many blocks of three things, of which two are on the device where one of them is used.
StepTrace BlocksOfThreeParts(size_t blocks) {
  StepTrace step =
      BlocksOfParts(std::vector<std::vector<uint64_t>>(blocks, {10, 50'000, 50'000, 50'000}));
  // To compute a whole block again takes less time than to compute each of its parts.
  for (StepSegment& segment : step.segments) {
    if (!segment.outer.has_value()) segment.before->compute_us = 9;
  }
  return step;
}

TEST(RecomputePlan, WhereAWholeSegmentHasNoRoomPartsOfItAreComputedAgain) {
  const StepTrace step = BlocksOfThreeParts(2);
  ASSERT_THAT(step.Validate(), IsOk());
  ASSERT_THAT(RecomputableSegments(step), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  const uint64_t memory_bytes = LeastMemoryBytes(step).value() + 500;
  EXPECT_THAT(PlanStep(WithRecomputation(step, {0}), memory_bytes, RoundLink()),
              StatusIs(absl::StatusCode::kResourceExhausted));
  const RecomputePlan recompute = PlanWithRecomputation(step, memory_bytes, RoundLink()).value();
  EXPECT_THAT(recompute.segments, Not(IsEmpty()));
  EXPECT_EQ(Wholes(step, recompute), 0);
  EXPECT_LE(recompute.plan.peak_bytes, memory_bytes);
  EXPECT_LT(recompute.plan.step_us, recompute.without.step_us);
}

TEST(RecomputePlan, OfManyBlocksInPartsBothGrainsAreTried) {
  const StepTrace step = BlocksOfThreeParts(24);
  const uint64_t least_bytes = LeastMemoryBytes(step).value();
  const RecomputePlan little = PlanWithRecomputation(step, least_bytes + 500, RoundLink()).value();
  const RecomputePlan more = PlanWithRecomputation(step, least_bytes + 60'000, RoundLink()).value();
  EXPECT_GT(little.segments.size(), 10u);
  EXPECT_EQ(Wholes(step, little), 0);
  EXPECT_GT(Wholes(step, more), 10);
  for (const RecomputePlan* recompute : {&little, &more}) {
    for (const uint32_t i : recompute->segments) {
      if (!step.segments[i].outer.has_value()) continue;
      EXPECT_THAT(recompute->segments, Not(Contains(*step.segments[i].outer)));
    }
  }
}

// Of a step that is so long few sets are tried.
TEST(RecomputePlan, OfVeryManyBlocksWithoutRoomForAWholeOnePartsAreComputedAgain) {
  const StepTrace step = BlocksOfThreeParts(200);
  const uint64_t memory_bytes = LeastMemoryBytes(step).value() + 500;
  const RecomputePlan recompute = PlanWithRecomputation(step, memory_bytes, RoundLink()).value();
  EXPECT_GT(recompute.segments.size(), 80u);
  EXPECT_EQ(Wholes(step, recompute), 0);
  EXPECT_LT(recompute.plan.step_us, 0.9 * recompute.without.step_us);
}

// Blocks that are alike leave many sets that take equally long.
TEST(RecomputePlan, AStepHasOnePlanWhereverTheHeapPutsWhatIsTried) {
  const StepTrace step = Blocks(std::vector<std::vector<uint64_t>>(24, {10, 500'000}));
  // Where two are computed again, whichever, nothing has to move.
  const uint64_t memory_bytes = 22 * 500'010 + 1'000;
  std::mt19937 random;
  std::vector<std::vector<char>> held;
  std::set<std::vector<uint32_t>> sets;
  for (int i = 0; i < 12; ++i) {
    sets.insert(PlanWithRecomputation(step, memory_bytes, RoundLink()).value().segments);
    // Holes of the size of a map's node, in an order of their own.
    for (int block = 0; block < 4'000; ++block) held.emplace_back(32 + random() % 64);
    std::shuffle(held.begin(), held.end(), random);
    held.resize(held.size() / 2);
  }
  EXPECT_THAT(sets, SizeIs(1));
  EXPECT_THAT(*sets.begin(), Not(IsEmpty()));
}

TEST(Recomputation, ASegmentOfWhichAPartWasComputedAgainCannotBe) {
  StepTrace step = BlocksOfParts({{1000, 20, 30}});
  step.segments[2].is_recomputed = true;
  EXPECT_THAT(RecomputableSegments(step), ElementsAre(1));
}

TEST(Recomputation, WithAPartOfASegmentTheRestOfItStays) {
  // Uses: 0 | 1 2, and backward 2 1 0.
  const StepTrace step = BlocksOfParts({{1000, 20, 30}});
  ASSERT_THAT(step.accesses, ElementsAre(0, 1, 2, 2, 1, 0));
  const StepTrace again = Again(step, {1});
  EXPECT_THAT(again.accesses, ElementsAre(0, 0, 1, 1, 0, 0));
  EXPECT_EQ(again.objects[1].size_bytes, 30u);
}

TEST(RecomputePlan, AMemoryThatIsTooSmallIsRefusedAsWithoutSegments) {
  const StepTrace step = Blocks({{10, 100}, {10, 100}});
  EXPECT_THAT(PlanWithRecomputation(step, LeastMemoryBytes(step).value() - 1, RoundLink()),
              StatusIs(absl::StatusCode::kResourceExhausted));
}

}  // namespace recompute_plan_test
}  // namespace pinion::testing
