#include "pinion/engine/planner/residency_planner.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {
namespace residency_planner_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int64_t kLimitBytes = 10500;

// Object 0 has to go before object 2 is made, which is idle in interval 4 and then keeps it from
// coming back earlier.
StepTrace Step(uint64_t small_bytes, uint64_t other_bytes) {
  StepTrace step;
  step.objects = {{.size_bytes = 8000}, {.size_bytes = 1000}, {.size_bytes = small_bytes}};
  step.accesses = {0, 1, 2, 1, 0, 2};
  step.intervals.assign(step.accesses.size() + 1, {.compute_us = 10});
  step.intervals[2].other_bytes = 8000;
  step.intervals[4].other_bytes = other_bytes;
  return step;
}

PlannedMoves PlannedWithin(int64_t limit_bytes, const StepTrace& step) {
  const ResidencyPlanner planner(step);
  return planner.MovesWithin(limit_bytes, EvictionRule::kHighest, planner.ByNextAccess());
}

TEST(ResidencyPlanner, WhatIsMuchSmallerAndWouldMakeRoomIsInTheWay) {
  const StepTrace step = Step(/*small_bytes=*/1000, /*other_bytes=*/1500);
  const PlannedMoves planned = PlannedWithin(kLimitBytes, step);
  EXPECT_THAT(planned.moves,
              ElementsAre(StepMove{.object = 0, .evict_at = 1, .fetch_at = 4, .read_at = 4}));
  ASSERT_THAT(planned.blockers, SizeIs(1));
  EXPECT_EQ(planned.blockers[0].interval, 4u);
  EXPECT_EQ(IdleIntervalsOf(step)[planned.blockers[0].idle].object, 2u);
}

TEST(ResidencyPlanner, WithoutTheBlockerTheOtherIsFetchedEarlier) {
  const StepTrace step = Step(/*small_bytes=*/1000, /*other_bytes=*/1500);
  const ResidencyPlanner planner(step);
  PlanPreferences preferences = planner.ByNextAccess();
  preferences.EvictEarlier(PlannedWithin(kLimitBytes, step).blockers);
  const PlannedMoves planned =
      planner.MovesWithin(kLimitBytes, EvictionRule::kHighest, preferences);
  EXPECT_THAT(planned.moves,
              ElementsAre(StepMove{.object = 0, .evict_at = 1, .fetch_at = 2, .read_at = 4},
                          StepMove{.object = 2, .evict_at = 3, .fetch_at = 4, .read_at = 5}));
  EXPECT_THAT(planned.blockers, IsEmpty());
}

TEST(ResidencyPlanner, WhatIsNotMuchSmallerOrWouldNotMakeRoomEnoughIsNotInTheWay) {
  EXPECT_THAT(
      PlannedWithin(kLimitBytes + 1000, Step(/*small_bytes=*/2001, /*other_bytes=*/1500)).blockers,
      IsEmpty());
  EXPECT_THAT(PlannedWithin(kLimitBytes, Step(/*small_bytes=*/1000, /*other_bytes=*/1501)).blockers,
              IsEmpty());
}

TEST(PlanPreferences, OfTwoIntervalsTheEarlierOneCounts) {
  PlanPreferences preferences;
  preferences.offloaded_by.assign(2, IdleInterval::kStays);
  for (const size_t interval : {7, 5, 6}) {
    preferences.EvictEarlier(Blocker{.idle = 1, .interval = interval});
  }
  EXPECT_THAT(preferences.offloaded_by, ElementsAre(IdleInterval::kStays, 5));
}

}  // namespace residency_planner_test
}  // namespace pinion
