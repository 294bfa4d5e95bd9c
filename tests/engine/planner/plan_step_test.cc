// The link carries 1000 bytes per microsecond, so times can be added by hand.

#include "pinion/engine/planner/plan_step.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_simulation.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/programs/step_bound.h"
#include "pinion/tests/engine/planner/small_steps.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace plan_step_test {

using ::pinion::testing::ForwardAndBackward;
using ::pinion::testing::IsOk;
using ::pinion::testing::RoundLink;
using ::pinion::testing::StatusIs;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kKb = 1000;

StepTrace Chain(const std::vector<uint64_t>& sizes_kb) {
  std::vector<StepObject> objects;
  for (const uint64_t size_kb : sizes_kb) objects.push_back({.size_bytes = size_kb * kKb});
  return ForwardAndBackward(objects);
}

// The same objects, used in this order.
StepTrace Accessed(const std::vector<uint64_t>& sizes_kb, std::vector<uint32_t> accesses) {
  StepTrace step = Chain(sizes_kb);
  step.accesses = std::move(accesses);
  step.intervals.assign(step.accesses.size() + 1, {.compute_us = 10});
  return step;
}

// Chain, whose intervals compute this long.
StepTrace Computing(double compute_us, const std::vector<uint64_t>& sizes_kb) {
  StepTrace step = Chain(sizes_kb);
  for (StepInterval& interval : step.intervals) interval.compute_us = compute_us;
  return step;
}

StepPlan Plan(const StepTrace& step, uint64_t memory_bytes) {
  return PlanStep(step, memory_bytes, RoundLink()).value();
}

// If nothing is moved.
uint64_t AllBytes(const StepTrace& step) {
  const StepPlan plan = Plan(step, uint64_t{1} << 40);
  EXPECT_THAT(plan.moves, IsEmpty());
  return plan.peak_bytes;
}

std::vector<uint32_t> Moved(const StepPlan& plan) {
  std::vector<uint32_t> objects;
  for (const StepMove& move : plan.moves) objects.push_back(move.object);
  return objects;
}

TEST(StepPlan, WhereAllFitsNothingIsMoved) {
  const StepTrace step = Chain({4, 4, 4, 4});
  const StepPlan plan = Plan(step, 16 * kKb);
  EXPECT_THAT(plan.moves, IsEmpty());
  EXPECT_EQ(plan.peak_bytes, 16 * kKb);
  EXPECT_EQ(plan.step_us, step.compute_us());
}

TEST(StepPlan, OfAForwardAndItsBackwardTheOldestAreOffloadedAndOnlyAsManyAsHaveTo) {
  const StepPlan plan = Plan(Chain({4, 4, 4, 4}), 12 * kKb);
  // Without offload all four would be resident after the forward. Object 0 is offloaded before
  // object 3 is created, and prefetched once object 3 was read.
  EXPECT_THAT(plan.moves,
              ElementsAre(StepMove{.object = 0, .evict_at = 2, .fetch_at = 5, .read_at = 7}));
  EXPECT_EQ(plan.peak_bytes, 12 * kKb);
  EXPECT_EQ(plan.step_us, 90) << "both copies hide behind the compute";
}

TEST(StepPlan, MoreIsMovedTheLessMemoryThereIs) {
  const StepTrace step = Chain({4, 4, 4, 4, 4, 4});
  EXPECT_THAT(Moved(Plan(step, 16 * kKb)), ElementsAre(1, 0));
  EXPECT_THAT(Moved(Plan(step, 12 * kKb)), ElementsAre(2, 1, 0));
}

TEST(StepPlan, OtherBytesTakeTheRoomOfObjects) {
  StepTrace step = Chain({4, 4, 4, 4});
  step.intervals[3].other_bytes = 4 * kKb;
  EXPECT_THAT(Moved(Plan(step, 16 * kKb)), ElementsAre(0));
}

TEST(StepPlan, WhatFreesNothingStays) {
  StepTrace step = Chain({4, 4, 4, 4});
  step.objects[0].frees = false;
  EXPECT_THAT(Moved(Plan(step, 8 * kKb)), ElementsAre(1));
}

TEST(StepPlan, WhatIsNeverReadIsOffloadedFirstAndNotFetched) {
  const StepTrace step = Accessed({4, 4, 4, 4}, {0, 1, 2, 3, 3, 2, 1});
  const StepPlan plan = Plan(step, 12 * kKb);
  ASSERT_THAT(Moved(plan), ElementsAre(0));
  EXPECT_EQ(plan.moves[0].fetch_at, StepMove::kNever);
}

TEST(StepPlan, WhatAKeptGraphNeedsIsThereUntilItIsReleased) {
  StepTrace step = Chain({4, 4, 4, 4});
  EXPECT_EQ(AllBytes(step), 16 * kKb);
  step.intervals.back().other_bytes = 12 * kKb;
  EXPECT_EQ(AllBytes(step), 16 * kKb);
  step.objects[3].needed_until = 8;
  EXPECT_EQ(AllBytes(step), 20 * kKb);
  const StepPlan plan = Plan(step, 16 * kKb);
  ASSERT_THAT(Moved(plan), ElementsAre(3));
  EXPECT_EQ(plan.moves[0].fetch_at, StepMove::kNever);
  EXPECT_EQ(plan.peak_bytes, 16 * kKb);
}

TEST(StepPlan, WhatIsReleasedUnreadTakesNoRoomBehindThat) {
  StepTrace step = Accessed({4, 4, 4, 4}, {0, 1, 2, 3, 3, 2, 0});
  step.intervals[5].other_bytes = 12 * kKb;
  EXPECT_EQ(AllBytes(step), 28 * kKb);
  step.objects[1].needed_until = 4;
  EXPECT_EQ(AllBytes(step), 24 * kKb);
}

TEST(StepPlan, WhatIsOverMakesNoRoomForOthers) {
  StepTrace step = Accessed({5, 10, 10, 10}, {0, 1, 2, 3, 3, 2, 1});
  step.objects[0].needed_until = 2;
  EXPECT_LE(Plan(step, 25 * kKb).peak_bytes, 25 * kKb);
}

TEST(StepPlan, WhatIsSavedAgainStaysUntilThen) {
  StepTrace step = Accessed({4, 4, 4}, {0, 1, 2, 0, 2, 1, 0});
  EXPECT_EQ(LeastMemoryBytes(step).value(), 8 * kKb);
  step.objects[0].saved_until = 3;
  EXPECT_EQ(LeastMemoryBytes(step).value(), 12 * kKb);
}

TEST(StepPlan, WhatIsOffloadedTwiceIsCopiedOutOnce) {
  StepTrace step = Accessed({4, 8, 8}, {0, 1, 1, 0, 2, 2, 0});
  step.intervals[2].other_bytes = step.intervals[5].other_bytes = 4 * kKb;
  const StepPlan plan = Plan(step, 12 * kKb);
  ASSERT_THAT(Moved(plan), ElementsAre(0, 0));
  EXPECT_TRUE(plan.moves[0].copies_out);
  EXPECT_FALSE(plan.moves[1].copies_out);
}

TEST(StepPlan, WhatIsComputedAgainGoesWhereTheLinkCannotHideACopy) {
  StepTrace step = Chain({40, 40, 40, 40});
  step.objects[1].recast_us = 5;
  const StepPlan plan = Plan(step, 120 * kKb);
  ASSERT_THAT(Moved(plan), ElementsAre(1)) << "object 0 is farther away";
  EXPECT_EQ(plan.moves[0].fetch_at, plan.moves[0].read_at) << "nobody has it before";
  EXPECT_FALSE(plan.moves[0].copies_out);
  EXPECT_EQ(plan.step_us, 95);
  step = Chain({4, 4, 4, 4});
  step.objects[1].recast_us = 5;
  EXPECT_THAT(Moved(Plan(step, 12 * kKb)), ElementsAre(0)) << "a copy is hidden";
}

TEST(StepPlan, WhatIsHeldByTheProgramMakesNoRoom) {
  StepTrace step = Chain({4, 4, 4, 4});
  EXPECT_THAT(Moved(Plan(step, 12 * kKb)), ElementsAre(0));
  step.objects[0].held_until = 3;
  EXPECT_THAT(Moved(Plan(step, 12 * kKb)), ElementsAre(1));
  EXPECT_EQ(LeastMemoryBytes(step).value(), 12 * kKb);
}

TEST(StepPlan, WhatOneOperatorUsesStaysUntilTheNextOneBegins) {
  StepTrace step = Chain({4, 4, 4, 4});
  EXPECT_EQ(LeastMemoryBytes(step).value(), 8 * kKb);
  step.operators = {1, 1, 1, 2, 3, 4, 5, 6};
  EXPECT_EQ(LeastMemoryBytes(step).value(), 16 * kKb) << "objects 0 to 2 while 3 is made";
}

TEST(StepPlan, AMemoryThatIsTooSmallIsToldTheLeastThatCanBe) {
  const StepTrace step = Chain({4, 4, 4, 4});
  EXPECT_THAT(PlanStep(step, 8 * kKb - 1, RoundLink()).status(),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("into 7999 bytes"), HasSubstr("least is 8000 bytes"))));
  EXPECT_THAT(PlanStep(step, 8 * kKb, RoundLink()), IsOk());
}

TEST(StepPlan, ASmallObjectGoesInsteadOfALargeOneWhereItMakesRoomEnough) {
  // Object 0 is farthest away, but its copy takes 40 us each way; object 1 is enough.
  const StepTrace step = Chain({40, 4, 4, 4});
  EXPECT_THAT(Moved(Plan(step, 49 * kKb)), ElementsAre(1));
}

TEST(StepPlan, WhatHasToGoFirstIsCopiedFirst) {
  // Objects 0 and 2 have to go before object 4 is made. While object 0 is copied, from 20 to 50 us,
  // object 1 could be copied next, but somebody holds it until the turn.
  StepTrace step = Chain({30, 30, 4, 4, 4});
  step.objects[1].held_until = 5;
  step.intervals[4].other_bytes = 36 * kKb;
  step.intervals[6].other_bytes = 50 * kKb;
  const StepPlan plan = Plan(step, 74 * kKb);
  ASSERT_THAT(Moved(plan), ElementsAre(2, 1, 0));
  EXPECT_EQ(plan.moves[0].copy_at, StepMove::kAtOnce);
  EXPECT_EQ(plan.moves[1].copy_at, 3u);
  EXPECT_EQ(plan.moves[2].copy_at, StepMove::kAtOnce);
  std::vector<StepMove> as_made = plan.moves;
  for (StepMove& move : as_made) move.copy_at = StepMove::kAtOnce;
  EXPECT_EQ(SimulateStep(step, plan.moves, RoundLink()).value().step_us, plan.step_us);
  EXPECT_EQ(SimulateStep(step, as_made, RoundLink()).value().step_us, plan.step_us + 20);
}

TEST(StepPlan, ASmallObjectIsOffloadedWhereAMuchLargerOneIsFetchedEarlierForIt) {
  // Object 0 has to go before object 2 is made, which then keeps it from coming back before its
  // read, where the compute would wait for 8 us.
  StepTrace step = Accessed({8, 1, 1}, {0, 1, 2, 1, 0, 2});
  step.intervals[2].other_bytes = 8 * kKb;
  step.intervals[4].other_bytes = 1500;
  const StepPlan plan = Plan(step, 10 * kKb + 500);
  ASSERT_THAT(Moved(plan), ElementsAre(0, 2));
  EXPECT_EQ(plan.moves[0].fetch_at, 2u);
  EXPECT_EQ(plan.step_us, step.compute_us() + 8 + 1) << "for the copies out";
}

TEST(StepPlan, AsLittleAsIsNeededTakesTheLeastMemoryThatCostsNoTime) {
  const StepTrace step = Computing(3, std::vector<uint64_t>(12, 4));  // a copy takes 4 us
  const StepPlan plan = PlanStepWithoutTarget(step, RoundLink()).value();
  EXPECT_LE(plan.step_us, kMaxSlowdown * step.compute_us());
  EXPECT_LT(plan.peak_bytes, 48 * kKb);
  EXPECT_GT(Plan(step, plan.peak_bytes - 4 * kKb).step_us, kMaxSlowdown * step.compute_us());
}

TEST(StepPlan, AsLittleAsIsNeededIsTheLeastOfAllWhereTheLinkHidesEverything) {
  const StepTrace step = Computing(1000, std::vector<uint64_t>(12, 4));
  EXPECT_EQ(PlanStepWithoutTarget(step, RoundLink()).value().peak_bytes,
            LeastMemoryBytes(step).value());
}

TEST(StepPlan, NoPlanIsShorterThanTheBound) {
  const StepTrace step = Computing(2, {4, 8, 2, 4, 16, 4, 2, 8});
  for (uint64_t memory = LeastMemoryBytes(step).value(); memory < 50 * kKb; memory += kKb) {
    EXPECT_GE(Plan(step, memory).step_us,
              StepLowerBoundUs(step, memory, RoundLink()).value() - 1e-6)
        << memory;
  }
}

// Returns the least processor time of planning a step with `objects` objects of many sizes.
double PlanningMs(size_t objects) {
  std::vector<uint64_t> sizes_kb;
  for (size_t i = 0; i < objects; ++i) sizes_kb.push_back(1 + i * 7919 % 97);
  const StepTrace step = Chain(sizes_kb);
  double best_ms = 1e9;
  for (int attempt = 0; attempt < 3; ++attempt) {
    const std::clock_t begin = std::clock();
    EXPECT_THAT(PlanStepWithoutTarget(step, RoundLink()), IsOk());
    best_ms = std::min(best_ms, 1e3 * static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
  }
  return best_ms;
}

TEST(StepPlan, EightTimesTheObjectsTakeNotMuchMoreThanEightTimesTheTime) {
  EXPECT_LT(PlanningMs(4000), 16 * PlanningMs(500));
}

TEST(StepPlan, RefusesWhatItCannotPlanByName) {
  StepTrace step = Chain({4, 4});
  step.objects[1].size_bytes = 0;
  EXPECT_THAT(PlanStep(step, 8 * kKb, RoundLink()).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("object 1")));
  EXPECT_THAT(PlanStepWithoutTarget(step, RoundLink()).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("object 1")));
  step.accesses.pop_back();
  EXPECT_THAT(LeastMemoryBytes(step).status(), StatusIs(absl::StatusCode::kInvalidArgument));
  EXPECT_THAT(PlanStep(Chain({4}), 8 * kKb, LinkCalibration()).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("d2h.gb_per_s")));
}

}  // namespace plan_step_test
}  // namespace pinion
