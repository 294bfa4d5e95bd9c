#include <cstdint>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/planner/residency_planner.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/tests/engine/planner/small_steps.h"

namespace pinion::testing {
namespace idle_intervals_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

constexpr uint64_t kSize = 100;

std::vector<std::pair<size_t, size_t>> IntervalsOf(const StepTrace& step, uint32_t object) {
  std::vector<std::pair<size_t, size_t>> intervals;
  for (const IdleInterval& idle : IdleIntervalsOf(step)) {
    if (idle.object == object) intervals.emplace_back(idle.first, idle.last);
  }
  return intervals;
}

// Uses: 0 1 2 3 3 2 1 0.
StepTrace FourObjects() { return ForwardAndBackward(kSize, {1, 2, 3, 4}); }

TEST(IdleIntervals, AnObjectMayBeOffloadedBehindItsOperatorUntilItIsRead) {
  EXPECT_THAT(IntervalsOf(FourObjects(), 0), ElementsAre(Pair(2, 7)));
  EXPECT_THAT(IntervalsOf(FourObjects(), 3), IsEmpty());
}

TEST(IdleIntervals, NotBeforeTheProgramReleasesIt) {
  StepTrace step = FourObjects();
  step.objects[0].held_until = 5;
  EXPECT_THAT(IntervalsOf(step, 0), ElementsAre(Pair(6, 7)));
  step.objects[0].held_until = 7;
  EXPECT_THAT(IntervalsOf(step, 0), IsEmpty()) << "held until it is read";
}

TEST(IdleIntervals, WhatTheProgramReferencesBeyondAReadMayBeOffloadedBeforeTheNext) {
  StepTrace step = FourObjects();
  step.accesses = {0, 1, 0, 1, 2, 3, 3, 0};
  step.objects[0].held_until = 4;
  EXPECT_THAT(IntervalsOf(step, 0), ElementsAre(Pair(5, 7)));
}

TEST(IdleIntervals, WhatFreesNothingStays) {
  StepTrace step = FourObjects();
  step.objects[0].frees = false;
  EXPECT_THAT(IntervalsOf(step, 0), IsEmpty());
}

TEST(IdleIntervals, WhatIsNeverReadMayBeOffloadedToTheEnd) {
  StepTrace step = FourObjects();
  step.accesses.pop_back();
  step.intervals.pop_back();
  EXPECT_THAT(IntervalsOf(step, 0), ElementsAre(Pair(2, 7)));
  EXPECT_EQ(IdleIntervalsOf(step).front().read_at, StepMove::kNever);
}

TEST(IdleIntervals, OfWhatGoesTwiceTheFirstCopyIsEnough) {
  StepTrace step = FourObjects();
  step.accesses = {0, 1, 2, 0, 3, 3, 2, 0};
  std::vector<IdleInterval> idle_intervals = IdleIntervalsOf(step);
  for (IdleInterval& idle : idle_intervals) {
    if (idle.object != 0) continue;
    idle.offloaded_from = idle.first;
    idle.offloaded_until = idle.last;
  }
  EXPECT_THAT(
      MovesOf(step, idle_intervals),
      ElementsAre(
          StepMove{.object = 0, .evict_at = 1, .fetch_at = 3, .read_at = 3},
          StepMove{.object = 0, .evict_at = 4, .fetch_at = 7, .read_at = 7, .copies_out = false}));
}

}  // namespace idle_intervals_test
}  // namespace pinion::testing
