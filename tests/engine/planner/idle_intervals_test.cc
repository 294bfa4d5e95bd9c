#include "pinion/engine/planner/idle_intervals.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/tests/engine/planner/small_steps.h"

namespace pinion::testing {
namespace step_gaps_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

constexpr uint64_t kSize = 100;

std::vector<std::pair<size_t, size_t>> StretchesOf(const std::vector<Gap>& gaps, uint32_t object) {
  std::vector<std::pair<size_t, size_t>> stretches;
  for (const Gap& gap : gaps) {
    if (gap.object == object) stretches.emplace_back(gap.first, gap.last);
  }
  return stretches;
}

// Uses: 0 1 2 3 3 2 1 0.
StepRecord FourObjects() { return ForwardAndBackward(kSize, {1, 2, 3, 4}); }

TEST(StepGaps, AnObjectMayBeAwayBehindItsOperatorUntilItIsRead) {
  EXPECT_THAT(StretchesOf(GapsOf(FourObjects()), 0), ElementsAre(Pair(2, 7)));
  EXPECT_THAT(StretchesOf(GapsOf(FourObjects()), 3), IsEmpty());
}

TEST(StepGaps, NotBeforeTheProgramLetsGoOfIt) {
  StepRecord step = FourObjects();
  step.objects[0].held_until = 5;
  EXPECT_THAT(StretchesOf(GapsOf(step), 0), ElementsAre(Pair(6, 7)));
}

TEST(StepGaps, WhatTheProgramHoldsUntilItIsReadStays) {
  StepRecord step = FourObjects();
  step.objects[0].held_until = 7;
  EXPECT_THAT(StretchesOf(GapsOf(step), 0), IsEmpty());
}

TEST(StepGaps, WhatTheProgramHoldsBeyondAReadMayBeAwayBeforeTheNext) {
  StepRecord step = FourObjects();
  step.uses = {0, 1, 0, 1, 2, 3, 3, 0};
  step.objects[0].held_until = 4;
  EXPECT_THAT(StretchesOf(GapsOf(step), 0), ElementsAre(Pair(5, 7)));
}

TEST(StepGaps, WhatFreesNothingStays) {
  StepRecord step = FourObjects();
  step.objects[0].frees = false;
  EXPECT_THAT(StretchesOf(GapsOf(step), 0), IsEmpty());
}

TEST(StepGaps, WhatIsNeverReadMayBeAwayToTheEnd) {
  StepRecord step = FourObjects();
  step.uses.pop_back();
  step.stretches.pop_back();
  const std::vector<Gap> gaps = GapsOf(step);
  EXPECT_THAT(StretchesOf(gaps, 0), ElementsAre(Pair(2, 7)));
  EXPECT_EQ(gaps.front().read_at, StepMove::kNever);
}

TEST(StepGaps, OfWhatGoesTwiceTheFirstCopyIsEnough) {
  StepRecord step = FourObjects();
  step.uses = {0, 1, 2, 0, 3, 3, 2, 0};
  std::vector<Gap> gaps = GapsOf(step);
  for (Gap& gap : gaps) {
    if (gap.object != 0) continue;
    gap.away_from = gap.first;
    gap.away_until = gap.last;
  }
  const std::vector<StepMove> moves = MovesOf(step, gaps);
  ASSERT_EQ(moves.size(), 2u);
  EXPECT_EQ(moves[0], (StepMove{.object = 0, .drop_at = 1, .fetch_at = 3, .read_at = 3}));
  EXPECT_EQ(
      moves[1],
      (StepMove{.object = 0, .drop_at = 4, .fetch_at = 7, .read_at = 7, .copies_out = false}));
}

}  // namespace step_gaps_test
}  // namespace pinion::testing
