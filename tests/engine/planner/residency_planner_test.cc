#include "pinion/engine/planner/residency_planner.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/planner/idle_intervals.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {
namespace planner_test {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr int64_t kLimitBytes = 10500;

// Object 0 has to go before object 2 is made, which is idle in stretch 4 and then keeps it from
// coming back earlier.
StepRecord Step(uint64_t small_bytes, uint64_t other_bytes) {
  StepRecord step;
  step.objects = {{.size_bytes = 8000}, {.size_bytes = 1000}, {.size_bytes = small_bytes}};
  step.uses = {0, 1, 2, 1, 0, 2};
  step.stretches.assign(step.uses.size() + 1, {.compute_us = 10});
  step.stretches[2].other_bytes = 8000;
  step.stretches[4].other_bytes = other_bytes;
  return step;
}

TEST(Planner, WhatIsMuchSmallerAndWouldMakeRoomIsInTheWay) {
  const StepRecord step = Step(/*small_bytes=*/1000, /*other_bytes=*/1500);
  const Planner planner(step);
  const PlannedMoves planned =
      planner.MovesWithin(kLimitBytes, Choice::kHighest, planner.ByNextUse());
  EXPECT_THAT(planned.moves,
              ElementsAre(StepMove{.object = 0, .drop_at = 1, .fetch_at = 4, .read_at = 4}));
  ASSERT_THAT(planned.in_the_way, SizeIs(1));
  EXPECT_EQ(planned.in_the_way[0].stretch, 4u);
  EXPECT_EQ(GapsOf(step)[planned.in_the_way[0].gap].object, 2u);
}

TEST(Planner, WithoutWhatWasInTheWayTheOtherComesBackEarlier) {
  const StepRecord step = Step(/*small_bytes=*/1000, /*other_bytes=*/1500);
  const Planner planner(step);
  PlanWishes wishes = planner.ByNextUse();
  wishes.LetGo(planner.MovesWithin(kLimitBytes, Choice::kHighest, wishes).in_the_way);
  const PlannedMoves planned = planner.MovesWithin(kLimitBytes, Choice::kHighest, wishes);
  EXPECT_THAT(planned.moves,
              ElementsAre(StepMove{.object = 0, .drop_at = 1, .fetch_at = 2, .read_at = 4},
                          StepMove{.object = 2, .drop_at = 3, .fetch_at = 4, .read_at = 5}));
  EXPECT_THAT(planned.in_the_way, IsEmpty());
}

TEST(Planner, WhatIsNotMuchSmallerIsNotInTheWay) {
  const StepRecord step = Step(/*small_bytes=*/2001, /*other_bytes=*/1500);
  const Planner planner(step);
  EXPECT_THAT(
      planner.MovesWithin(kLimitBytes + 1000, Choice::kHighest, planner.ByNextUse()).in_the_way,
      IsEmpty());
}

TEST(Planner, WhatWouldNotMakeRoomEnoughIsNotInTheWay) {
  const StepRecord step = Step(/*small_bytes=*/1000, /*other_bytes=*/1501);
  const Planner planner(step);
  EXPECT_THAT(planner.MovesWithin(kLimitBytes, Choice::kHighest, planner.ByNextUse()).in_the_way,
              IsEmpty());
}

TEST(PlanWishes, OfTwoStretchesTheEarlierOneCounts) {
  PlanWishes wishes;
  wishes.leaves_by.assign(2, Gap::kStays);
  wishes.LetGo(InTheWay{.gap = 1, .stretch = 7});
  wishes.LetGo(InTheWay{.gap = 1, .stretch = 5});
  wishes.LetGo(InTheWay{.gap = 1, .stretch = 6});
  EXPECT_THAT(wishes.leaves_by, ElementsAre(Gap::kStays, 5));
}

}  // namespace planner_test
}  // namespace pinion
