#include "pinion/engine/schedule/planned_schedule.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/explain_plan.h"
#include "pinion/engine/planner/idle_intervals.h"
#include "pinion/engine/planner/plan_step.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/engine/schedule/cached_plan.h"
#include "pinion/engine/schedule/offload_schedule.h"
#include "pinion/engine/schedule/set_aside.h"
#include "pinion/tests/engine/planner/small_steps.h"
#include "pinion/tests/engine/schedule/target_player.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace planned_schedule_test {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;
using ::testing::Not;
using ::testing::SizeIs;

constexpr uint64_t kSize = TargetPlayer::kSize;

TargetOptions Within(uint64_t memory_bytes) {
  return {.memory_bytes = memory_bytes, .link = RoundLink()};
}

// Tensors with these signatures.
StepTrace Chain(const std::vector<uint64_t>& signatures) {
  return ForwardAndBackward(kSize, signatures);
}

// A plan of the test's own.
std::shared_ptr<const CachedPlan> Planned(StepTrace step, std::vector<StepMove> moves) {
  StepPlan plan;
  plan.moves = std::move(moves);
  return std::make_shared<const CachedPlan>(std::move(step), std::move(plan));
}

// Four tensors, uses 0 to 3 and in reverse 4 to 7. Tensor 0 goes when the third one has been saved,
// and is fetched when the third one is read.
std::shared_ptr<const CachedPlan> FourTensors() {
  return Planned(Chain({1, 2, 3, 4}), {{.object = 0, .evict_at = 2, .fetch_at = 5, .read_at = 7}});
}

// Four tensors. The operator behind the second one takes as much as three for a moment.
std::shared_ptr<const CachedPlan> MuchBehindTheSecond() {
  StepTrace step = Chain({1, 2, 3, 4});
  step.intervals[2].transient_bytes = 3 * kSize;
  return Planned(std::move(step), {{.object = 0, .evict_at = 4, .fetch_at = 5, .read_at = 7}});
}

std::vector<uint64_t> FirstSignatures(const PlannedSchedule& schedule) {
  std::vector<uint64_t> signatures;
  for (const auto& cached : schedule.cached()) {
    signatures.push_back(cached->step().objects[0].signature);
  }
  return signatures;
}

// --- Unknown steps ---

TEST(PlannedSchedule, WhileNoStepIsKnownAllLeaveAndAreDroppedAtOnce) {
  PlannedSchedule schedule(Within(100 * kSize));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3});
  EXPECT_THAT(player.Happened(), ElementsAre("out 0", "drop 0", "out 1", "drop 1"));
  player.EndForward();
  EXPECT_THAT(player.Happened(), ElementsAre("out 2", "drop 2"));
}

TEST(PlannedSchedule, WhileNoStepIsKnownNothingIsFetchedAhead) {
  PlannedSchedule schedule(Within(100 * kSize));
  TargetPlayer player(schedule);
  player.Play({1, 2, 3});
  EXPECT_THAT(player.Happened(), ElementsAre("out 0", "drop 0", "out 1", "drop 1", "out 2",
                                             "drop 2", "demand 2", "demand 1", "demand 0"));
}

// What several readers have saved is unpacked once for each of them, and each fetch brings another
// copy: the one before has its own.
TEST(PlannedSchedule, WhileNoStepIsKnownWhatIsReadSeveralTimesInARowGoesBehindTheLast) {
  PlannedSchedule schedule(Within(100 * kSize));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3});
  player.EndForward();
  player.Happened();
  player.Read(2);
  player.Read(2);
  player.Read(2);
  EXPECT_THAT(player.Happened(), ElementsAre("demand 2"));
  player.Read(1);
  EXPECT_THAT(player.Happened(), ElementsAre("drop 2", "demand 1"));
}

TEST(PlannedSchedule, WithATargetNothingWaitsForCompany) {
  TargetOptions options = Within(100 * kSize);
  options.windows = {.eviction_bytes = 100 * kSize, .full_batch_bytes = kSize};
  const PlannedSchedule schedule(options);
  EXPECT_EQ(schedule.BatchBytes(), 0u);
  EXPECT_EQ(schedule.LateBytes(), 0u);
}

// A parcel that comes back brings all that is in it, which nobody has planned for.
TEST(PlannedSchedule, WithATargetNothingSmallSharesAParcelUntilTheStepIsKnown) {
  TargetOptions options = Within(100 * kSize);
  options.link = AssumedLink();  // of which 20,000 bytes are small
  PlannedSchedule schedule(options);
  const auto batch_key = [&schedule](uint64_t size_bytes) {
    return schedule.BatchKey(schedule.OnSaved(/*scope=*/1, {size_bytes, /*signature=*/9}).object);
  };
  const uint64_t first = batch_key(kSize);
  EXPECT_NE(first, 0u);
  EXPECT_NE(batch_key(kSize), first);
  EXPECT_EQ(batch_key(1 << 20), 0u) << "what is large has a parcel of its own anyhow";
  options.memory_bytes.reset();
  PlannedSchedule by_windows(options);
  EXPECT_EQ(by_windows.BatchKey(by_windows.OnSaved(1, {kSize, 9}).object), 0u);
}

TEST(PlannedSchedule, WhatHasStayedAndLeavesLateSharesNoParcelEither) {
  TargetOptions options = Within(100 * kSize);
  options.link = AssumedLink();
  PlannedSchedule schedule(options);
  schedule.Learn(Planned(Chain({1, 2, 3}), {}));
  const uint32_t first = schedule.OnSaved(/*scope=*/1, {kSize, 1}).object;
  const uint32_t second = schedule.OnSaved(/*scope=*/1, {kSize, 2}).object;
  schedule.OnSaved(/*scope=*/1, {kSize, /*signature=*/77});
  ASSERT_THAT(schedule.TakeDeferredOffloads(), ElementsAre(first, second));
  EXPECT_NE(schedule.BatchKey(first), 0u);
  EXPECT_NE(schedule.BatchKey(first), schedule.BatchKey(second));
}

TEST(PlannedSchedule, WhatIsSmallSharesAParcelWithWhatThePlanMovesAtTheSameTimes) {
  TargetOptions options = Within(100 * kSize);
  options.link = AssumedLink();
  PlannedSchedule schedule(options);
  StepTrace step = Chain({1, 2, 3});
  step.operators = {0, 1, 2, 3, 4, 4};  // one reads both that the plan moves
  schedule.Learn(Planned(step, {{.object = 0, .evict_at = 2, .fetch_at = 3, .read_at = 5},
                                {.object = 1, .evict_at = 2, .fetch_at = 3, .read_at = 4}}));
  for (const uint64_t signature : {1, 2, 3}) schedule.OnSaved(/*scope=*/1, {kSize, signature});
  EXPECT_EQ(schedule.BatchKey(0), schedule.BatchKey(1));
  EXPECT_EQ(schedule.BatchKey(2), CachedPlan::UniqueBatchKey(2))
      << "it leaves for the target alone";
}

TEST(PlannedSchedule, AStepLastsAsLongAsAnyTensorIsNeeded) {
  PlannedSchedule schedule(Within(100 * kSize));
  TargetPlayer player(schedule);
  EXPECT_FALSE(schedule.IsInStep());
  player.SaveAll({1, 2});
  player.Release(1);
  EXPECT_TRUE(schedule.IsInStep());
  player.Release(0);
  EXPECT_FALSE(schedule.IsInStep());
}

// --- Steps worth recording ---

TEST(PlannedSchedule, TheFirstStepIsWorthRecording) {
  PlannedSchedule schedule(Within(3 * kSize));
  EXPECT_TRUE(schedule.WantsRecord());
  TargetPlayer(schedule).Play({1, 2, 3, 4});
  EXPECT_TRUE(schedule.WantsRecord());
}

TEST(PlannedSchedule, AfterThreeKnownStepsInARowNothingIsWorthRecording) {
  PlannedSchedule schedule(Within(3 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  for (int step = 0; step < PlannedSchedule::kKnownInARow; ++step) {
    EXPECT_TRUE(schedule.WantsRecord()) << step;
    player.Play({1, 2, 3, 4});
  }
  EXPECT_FALSE(schedule.WantsRecord());
}

TEST(PlannedSchedule, AStepThatTurnsOutToBeUnknownMakesTheNextThreeWorthRecording) {
  PlannedSchedule schedule(Within(3 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  for (int step = 0; step < PlannedSchedule::kKnownInARow; ++step) player.Play({1, 2, 3, 4});
  ASSERT_FALSE(schedule.WantsRecord());
  player.SaveAll({1, 2});
  player.Save(9);
  player.EndStep();
  for (int step = 0; step < PlannedSchedule::kKnownInARow; ++step) {
    EXPECT_TRUE(schedule.WantsRecord()) << step;
    player.Play({1, 2, 3, 4});
  }
  EXPECT_FALSE(schedule.WantsRecord());
}

TEST(PlannedSchedule, AStepThatIsNoLongerWhatIsKnownOfItIsWorthRecordingTwice) {
  PlannedSchedule schedule(Within(3 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  for (int step = 0; step < PlannedSchedule::kKnownInARow; ++step) player.Play({1, 2, 3, 4});
  ASSERT_FALSE(schedule.WantsRecord());
  schedule.RecordAgain();
  for (int step = 0; step < 2; ++step) {
    EXPECT_TRUE(schedule.WantsRecord()) << step;
    player.Play({1, 2, 3, 4});
  }
  EXPECT_FALSE(schedule.WantsRecord());
}

TEST(PlannedSchedule, StepsThatAddToGradientsAreRecordedAsOftenAsThoseThatMakeThem) {
  PlannedSchedule schedule(Within(3 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  for (int step = 0; step < PlannedSchedule::kKnownInARow; ++step) player.Play({1, 2, 3, 4});
  EXPECT_FALSE(schedule.WantsRecord());
  schedule.set_begins_with_gradients(true);
  for (int step = 0; step < PlannedSchedule::kKnownInARow; ++step) {
    EXPECT_TRUE(schedule.WantsRecord()) << step;
    player.Play({1, 2, 3, 4});
  }
  EXPECT_FALSE(schedule.WantsRecord());
  schedule.RecordAgain();
  EXPECT_TRUE(schedule.WantsRecord());
  schedule.set_begins_with_gradients(false);
  EXPECT_FALSE(schedule.WantsRecord()) << "nothing is wrong with those";
}

TEST(PlannedSchedule, AStepThatIsRaisedMayHaveAMixUnlessItWasTried) {
  StepTrace step = Chain({1, 2});
  step.segments.resize(1);
  for (const bool was_tried : {false, true}) {
    PlannedSchedule schedule(Within(100 * kSize));
    auto cached = Planned(step, {});
    if (was_tried) cached = cached->WithRecomputeTried();
    schedule.Learn(cached);
    schedule.LearnRaised(Planned(step.WithMore(kSize), {}), *cached);
    ASSERT_EQ(schedule.cached().size(), 1u);
    EXPECT_EQ(schedule.cached().front()->step().intervals[0].other_bytes, kSize);
    EXPECT_EQ(schedule.cached().front()->WantsRecomputeTrial(), !was_tried);
  }
}

TEST(PlannedSchedule, WhatIsForgottenRunsLikeTheFirstStepAndIsWorthRecording) {
  PlannedSchedule schedule(Within(3 * kSize));
  TargetPlayer player(schedule);
  const std::vector<std::vector<uint64_t>> shapes = {{1, 2, 3, 4}, {11, 12, 13, 14}, {21, 22, 23}};
  for (const auto& shape : shapes) schedule.Learn(schedule.Plan(Chain(shape)).value());
  for (int turn = 0; turn < 2; ++turn) {
    for (const auto& shape : shapes) player.Play(shape);
  }
  ASSERT_FALSE(schedule.WantsRecord());
  schedule.ForgetPlans();
  EXPECT_THAT(schedule.cached(), IsEmpty());
  for (const auto& shape : shapes) {
    player.Play(shape);
    EXPECT_EQ(schedule.followed(), nullptr);
    EXPECT_TRUE(schedule.WantsRecord());
  }
}

TEST(PlannedSchedule, AStepThatRunsWhenAllIsForgottenGoesOnAsPlanned) {
  PlannedSchedule schedule(Within(100 * kSize));
  const std::shared_ptr<const CachedPlan> cached = FourTensors();
  schedule.Learn(cached);
  TargetPlayer player(schedule);
  player.SaveAll({1, 2});
  schedule.ForgetPlans();
  player.SaveAll({3, 4});
  player.EndForward();
  EXPECT_THAT(player.Happened(), ElementsAre("stay 1", "out 0", "stay 2", "drop 0", "stay 3"));
  EXPECT_EQ(schedule.followed(), cached);
  player.EndStep();
  player.Save(1);
  EXPECT_EQ(schedule.followed(), nullptr);
}

// How many of that many steps, which are all different, are recorded.
int RecordsOf(PlannedSchedule& schedule, uint64_t steps) {
  TargetPlayer player(schedule);
  int records = 0;
  for (uint64_t step = 1; step <= steps; ++step) {
    const bool is_recorded = schedule.WantsRecord();
    player.Play({100 * step, 100 * step + 1});
    if (!is_recorded) continue;
    ++records;
    schedule.Learn(Planned(Chain({100 * step, 100 * step + 1}), {}));
  }
  return records;
}

TEST(PlannedSchedule, WhereStepsAreNeverAlikeTheyAreRecordedLessAndLessOften) {
  PlannedSchedule schedule(Within(3 * kSize));
  const int of_the_first = RecordsOf(schedule, 1000);
  EXPECT_LT(of_the_first, 250);
  PlannedSchedule other(Within(3 * kSize));
  EXPECT_LT(RecordsOf(other, 8000), of_the_first + 3 * PlannedSchedule::kMaxCached + 3);
}

TEST(PlannedSchedule, WhereStepsBeginToBeAlikeTheyAreRecordedAgainSoon) {
  PlannedSchedule schedule(Within(3 * kSize));
  RecordsOf(schedule, 1000);
  TargetPlayer player(schedule);
  int steps = 0;
  for (; !schedule.WantsRecord(); ++steps) player.Play({1, 2, 3, 4});
  EXPECT_LE(steps, 1000 / 32);
}

TEST(PlannedSchedule, AKnownStepAmongOthersMakesAllOfThemWorthRecording) {
  PlannedSchedule schedule(Within(3 * kSize));
  RecordsOf(schedule, 1000);
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.Play({1, 2, 3, 4});
  EXPECT_TRUE(schedule.WantsRecord());
  player.Play({7, 8});
  EXPECT_TRUE(schedule.WantsRecord());
}

TEST(PlannedSchedule, WhatWasFollowedIsToldUntilTheNextStepBegins) {
  PlannedSchedule schedule(Within(3 * kSize));
  TargetPlayer player(schedule);
  player.Play({1, 2, 3, 4});
  EXPECT_EQ(schedule.followed(), nullptr);
  const std::shared_ptr<const CachedPlan> cached = FourTensors();
  schedule.Learn(cached);
  player.Play({1, 2, 3, 4});
  EXPECT_EQ(schedule.followed(), cached);
  player.Play({9});
  EXPECT_EQ(schedule.followed(), nullptr);
}

// --- A cached plan ---

TEST(PlannedSchedule, WhatThePlanDoesNotMoveStays) {
  PlannedSchedule schedule(Within(3 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  EXPECT_THAT(player.Happened(), ElementsAre("stay 1", "out 0", "stay 2", "drop 0", "stay 3"));
}

TEST(PlannedSchedule, AKnownStepIsDroppedAtThePlannedUsesAndNotBefore) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 4}), {{.object = 1, .evict_at = 3, .fetch_at = 6, .read_at = 6},
                                    {.object = 0, .evict_at = 4, .fetch_at = 7, .read_at = 7}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3});
  EXPECT_THAT(player.Happened(), ElementsAre("out 0", "stay 2", "out 1"));
  player.Save(4);
  EXPECT_THAT(player.Happened(), ElementsAre("stay 3", "drop 1"));
  player.EndForward();
  EXPECT_THAT(player.Happened(), IsEmpty());
  player.Read(3);
  EXPECT_THAT(player.Happened(), ElementsAre("drop 0"));
}

TEST(PlannedSchedule, AKnownStepIsFetchedFromThePlannedUsesOnAndNotBefore) {
  PlannedSchedule schedule(Within(3 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  player.Read(3);
  player.Release(3);
  player.Happened();
  player.Read(2);
  EXPECT_THAT(player.Happened(), ElementsAre("fetch 0"));
}

// Tensor 1 is copied before tensor 0, which it is dropped before.
std::shared_ptr<const CachedPlan> FourTensorsOfWhichOneWaits() {
  return Planned(Chain({1, 2, 3, 4}),
                 {{.object = 1, .evict_at = 2, .fetch_at = 5, .read_at = 6},
                  {.object = 0, .evict_at = 3, .fetch_at = 6, .read_at = 7, .copy_at = 2}});
}

TEST(PlannedSchedule, WhatIsCopiedBehindOthersStaysUntilTheyHaveLeft) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensorsOfWhichOneWaits());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 0"));
  player.Save(3);
  EXPECT_THAT(player.Happened(), ElementsAre("stay 2", "out 1", "out 0", "drop 1"));
  player.Save(4);
  EXPECT_THAT(player.Happened(), ElementsAre("stay 3", "drop 0"));
}

TEST(PlannedSchedule, OfThoseThatWaitForOneUseTheFirstToBeDroppedLeavesFirst) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(Planned(Chain({1, 2, 3, 4}),
                         {{.object = 1, .evict_at = 3, .fetch_at = 6, .read_at = 6, .copy_at = 3},
                          {.object = 0, .evict_at = 4, .fetch_at = 7, .read_at = 7, .copy_at = 3},
                          {.object = 2, .evict_at = 3, .fetch_at = 5, .read_at = 5}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3});
  player.Happened();
  player.Save(4);
  EXPECT_THAT(player.Happened(),
              ElementsAre("stay 3", "out 2", "out 1", "out 0", "drop 1", "drop 2"));
}

TEST(PlannedSchedule, WhatComesWhenItsCopyIsDueDoesNotWait) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensorsOfWhichOneWaits());
  TargetPlayer player(schedule);
  player.SaveAll({2, 3, 1});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 1", "out 0", "drop 0"));
  player.Save(4);
  EXPECT_THAT(player.Happened(), ElementsAre("stay 3", "out 2", "drop 2"));
}

TEST(PlannedSchedule, WhatWaitsInAStepThatIsAnotherOneLeavesWithTheRest) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensorsOfWhichOneWaits());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 0"));
  player.Save(77);
  EXPECT_THAT(player.Happened(), ElementsAre("out 1", "out 0", "drop 1", "drop 0"));
}

// What leaves together has left when all of it has.
TEST(PlannedSchedule, OfWhatIsLargeOnlyWhatIsDroppedTogetherLeavesTogether) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 4}), {{.object = 2, .evict_at = 3, .fetch_at = 4, .read_at = 5},
                                    {.object = 1, .evict_at = 4, .fetch_at = 5, .read_at = 6},
                                    {.object = 0, .evict_at = 3, .fetch_at = 6, .read_at = 7}}));
  std::vector<uint64_t> batch_keys;
  for (const uint64_t signature : {1, 2, 3}) {
    batch_keys.push_back(
        schedule.BatchKey(schedule.OnSaved(/*scope=*/1, {kSize, signature}).object));
  }
  EXPECT_EQ(batch_keys[0], batch_keys[2]);
  EXPECT_NE(batch_keys[0], batch_keys[1]);
}

// The plan is a preference, the target a rule.
TEST(PlannedSchedule, WhereTheDeviceHasMoreThanItMayWhatWaitsAndWhatThePlanKeepsLeaves) {
  PlannedSchedule schedule(Within(5 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 4}),
              {{.object = 0, .evict_at = 5, .fetch_at = 6, .read_at = 7, .copy_at = 5}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 0", "stay 1"));
  player.SetOtherBytes(4 * kSize);
  player.Save(3);
  player.SetOtherBytes(0);
  player.Save(4);
  EXPECT_THAT(player.Happened(),
              ElementsAre("stay 2", "out 0", "out 1", "drop 0", "drop 1", "stay 3"));
}

TEST(PlannedSchedule, ItIsKnownThatBytesAreLackingUntilEnoughHasGone) {
  PlannedSchedule schedule(Within(4 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.Save(1);
  schedule.OnDeviceBytes(3 * kSize, /*visiting_bytes=*/0);
  EXPECT_FALSE(schedule.LacksBytes()) << "the next one is made";
  schedule.OnDeviceBytes(3 * kSize + 1, /*visiting_bytes=*/0);
  EXPECT_TRUE(schedule.LacksBytes());
}

// It has come to them in another order before it was known to be that step.
TEST(PlannedSchedule, AStepThatGoesOnAsAnotherOneKnowsWhetherItHasLeftOutUsesOfThat) {
  for (const bool in_order : {true, false}) {
    PlannedSchedule schedule(Within(6 * kSize));
    StepTrace much_at_first = Chain({1, 2, 3, 4});
    much_at_first.intervals[1].transient_bytes = 3 * kSize;
    schedule.Learn(Planned(much_at_first, {}));
    const std::vector<uint64_t> before =
        in_order ? std::vector<uint64_t>{1, 2, 3} : std::vector<uint64_t>{1, 3, 2};
    std::vector<uint64_t> likely = before;
    likely.push_back(9);
    schedule.Learn(Planned(Chain(likely), {}));
    TargetPlayer player(schedule);
    player.SaveAll(before);
    player.Save(4);
    ASSERT_NE(schedule.followed(), nullptr);
    ASSERT_EQ(schedule.followed()->step().objects.back().signature, 4u);
    schedule.OnDeviceBytes(4 * kSize, /*visiting_bytes=*/0);
    EXPECT_EQ(schedule.LacksBytes(), !in_order);
  }
}

TEST(PlannedSchedule, AStepThatIsNotKnownLacksNothingThatCouldLeave) {
  PlannedSchedule schedule(Within(4 * kSize));
  TargetPlayer player(schedule);
  player.Save(1);
  schedule.OnDeviceBytes(100 * kSize, /*visiting_bytes=*/0);
  EXPECT_FALSE(schedule.LacksBytes());
}

// First what is read last, and no more than is missing.
TEST(PlannedSchedule, OfWhatThePlanKeepsAsMuchLeavesAsTheDeviceLacks) {
  PlannedSchedule schedule(Within(5 * kSize));
  schedule.Learn(Planned(Chain({1, 2, 3, 4}), {}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 0", "stay 1", "stay 2"));
  player.SetOtherBytes(kSize);
  player.Save(4);
  EXPECT_THAT(player.Happened(), ElementsAre("stay 3"));
  player.SetOtherBytes(2 * kSize);
  player.Read(3);
  EXPECT_THAT(player.Happened(), ElementsAre("out 0", "drop 0"));
  EXPECT_LE(player.device_bytes(), 5 * kSize);
  player.Release(3);
  for (const size_t number : {2, 1}) {
    player.Read(number);
    player.Release(number);
  }
  player.Read(0);
  EXPECT_THAT(player.Happened(), ElementsAre("demand 0"));
}

// The next operator may fetch a layer before the schedule is asked again.
TEST(PlannedSchedule, AStepThatHasMoreThanPlannedLeavesStreamedWeightsTheirRoom) {
  for (const uint64_t visiting_bytes : {uint64_t{0}, kSize, 2 * kSize}) {
    PlannedSchedule schedule(Within(7 * kSize));
    StepPlan plan;
    plan.peak_bytes = 4 * kSize;
    schedule.Learn(std::make_shared<const CachedPlan>(Chain({1, 2, 3, 4}), plan, absl::OkStatus(),
                                                      std::vector<uint32_t>(), 5 * kSize));
    TargetPlayer player(schedule);
    player.SetVisitingBytes(visiting_bytes);
    player.SaveAll({1, 2, 3, 4});
    player.EndForward();
    player.SetOtherBytes(kSize);
    player.Read(3);
    EXPECT_THAT(player.Happened(), ElementsAre("stay 0", "stay 1", "stay 2", "stay 3"));
    player.Release(3);
    player.SetOtherBytes(3 * kSize);
    player.Read(2);
    EXPECT_THAT(player.Happened(), ElementsAre("out 0", "drop 0"))
        << visiting_bytes << " bytes of weights are there";
  }
}

// It would come back at once, as a copy that nobody has counted.
TEST(PlannedSchedule, WhatIsReadNowIsNotDroppedForItsOwnReader) {
  PlannedSchedule schedule(Within(5 * kSize));
  StepTrace step = Chain({1, 2, 3, 4});
  step.accesses.push_back(3);  // 0 1 2 3 | 3 2 1 0 3
  step.intervals.emplace_back();
  schedule.Learn(Planned(step, {{.object = 0, .evict_at = 5, .fetch_at = 6, .read_at = 7},
                                {.object = 3, .evict_at = 5, .fetch_at = 7, .read_at = 8}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  player.Happened();
  player.SetOtherBytes(3 * kSize);
  player.Read(3);
  EXPECT_THAT(player.Happened(), ElementsAre("out 1", "drop 0", "drop 1"));
}

// Weights in use may take more than was set aside for them.
TEST(PlannedSchedule, WhatHasLeftGivesWayToWhatVisits) {
  PlannedSchedule schedule(Within(5 * kSize));
  StepPlan plan;
  plan.moves = {{.object = 0, .evict_at = 5, .fetch_at = 6, .read_at = 7}};
  plan.peak_bytes = 4 * kSize;
  schedule.Learn(std::make_shared<const CachedPlan>(Chain({1, 2, 3, 4}), std::move(plan)));
  TargetPlayer player(schedule);
  player.SetVisitingBytes(2 * kSize);
  player.SaveAll({1, 2});
  EXPECT_TRUE(player.IsHere(0));
  player.Save(3);
  EXPECT_FALSE(player.IsHere(0));
  EXPECT_TRUE(player.IsHere(1)) << "which the plan keeps";
}

// Dropping it would free nothing by now.
TEST(PlannedSchedule, WhatTheProgramHoldsDoesNotLeaveForTheTarget) {
  PlannedSchedule schedule(Within(4 * kSize));
  StepTrace step = Chain({1, 2, 3, 4});
  step.objects[0].held_until = 5;
  step.objects[1].frees = false;
  schedule.Learn(Planned(step, {}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3});
  player.Happened();
  player.SetOtherBytes(2 * kSize);
  player.Save(4);
  EXPECT_THAT(player.Happened(), ElementsAre("stay 3", "out 2", "drop 2"));
}

TEST(PlannedSchedule, WhereAllIsToGoWhatWaitsLeaves) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 4}),
              {{.object = 0, .evict_at = 5, .fetch_at = 6, .read_at = 7, .copy_at = 5}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2});
  EXPECT_THAT(schedule.TakeAllEvictions(), IsEmpty());
  player.Happened();
  player.Save(3);
  EXPECT_THAT(player.Happened(), ElementsAre("stay 2", "out 0"));
}

TEST(PlannedSchedule, WhatGoesWhileItWaitsIsNotAskedForAgain) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensorsOfWhichOneWaits());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2});
  player.Release(0);
  player.Happened();
  player.Save(3);
  EXPECT_THAT(player.Happened(), ElementsAre("stay 2", "out 1", "drop 1"));
}

TEST(PlannedSchedule, FetchesComeInTheOrderOfThePlan) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 4}), {{.object = 2, .evict_at = 3, .fetch_at = 4, .read_at = 5},
                                    {.object = 0, .evict_at = 2, .fetch_at = 4, .read_at = 7},
                                    {.object = 1, .evict_at = 3, .fetch_at = 5, .read_at = 6}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  player.Happened();
  player.Read(3);
  EXPECT_THAT(player.Happened(), ElementsAre("fetch 2", "fetch 0"));
  player.Read(2);
  EXPECT_THAT(player.Happened(), ElementsAre("fetch 1"));
}

TEST(PlannedSchedule, WhatLeavesWhenItsDropIsDueGoesAtOnce) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.HoldBack();
  player.SaveAll({1, 2, 3, 4});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 1", "stay 2", "stay 3"));
  player.EndForward();
  EXPECT_THAT(player.Happened(), ElementsAre("out 0", "drop 0"));
}

TEST(PlannedSchedule, WhatIsDroppedTwiceIsFetchedTwice) {
  PlannedSchedule schedule(Within(100 * kSize));
  StepTrace step = Chain({1, 2, 3, 4});
  step.accesses.insert(step.accesses.begin() + 6, 0);  // 0 1 2 3 | 3 2 0 1 0
  step.intervals.emplace_back();
  schedule.Learn(Planned(
      step, {{.object = 0, .evict_at = 2, .fetch_at = 4, .read_at = 6},
             {.object = 0, .evict_at = 7, .fetch_at = 8, .read_at = 8, .copies_out = false}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  player.Happened();
  player.Read(3);
  player.Read(2);
  player.Read(0);
  EXPECT_THAT(player.Happened(), ElementsAre("fetch 0"));
  player.Read(1);
  EXPECT_THAT(player.Happened(), ElementsAre("drop 0"));
  player.Read(0);
  EXPECT_THAT(player.Happened(), ElementsAre("demand 0"));
}

TEST(PlannedSchedule, WhatItsLastReaderHasFetchedIsNotFetchedOnceMoreForNobody) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3}), {{.object = 0, .evict_at = 2, .fetch_at = 5, .read_at = 5}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3});
  player.EndForward();
  player.Read(2);
  player.Read(1);
  player.Happened();
  player.ReadLast(0);
  EXPECT_THAT(player.Happened(), ElementsAre("demand 0"));
}

TEST(PlannedSchedule, WhatHasGoneToMakeRoomIsNotDroppedOnceMore) {
  PlannedSchedule schedule(Within(100 * kSize));
  StepTrace step = Chain({1, 2, 3, 4});
  step.accesses = {0, 0, 1, 2, 3,
                   3, 2, 0, 1, 0};  // a branch saves tensor 0 again, and reads it first
  step.intervals.resize(step.accesses.size() + 1);
  step.objects[0].saved_until = 1;
  schedule.Learn(Planned(
      step, {{.object = 0, .evict_at = 3, .fetch_at = 5, .read_at = 7},
             {.object = 0, .evict_at = 8, .fetch_at = 9, .read_at = 9, .copies_out = false}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  player.Read(3);
  EXPECT_TRUE(player.IsHere(0));
  player.WantRoom();
  player.Read(2);
  player.WantRoom();
  player.Happened();
  player.Read(1);
  EXPECT_THAT(player.Happened(), IsEmpty()) << "it was to be read before, so its reader fetches it";
  player.Read(0);
  EXPECT_THAT(player.Happened(), ElementsAre("demand 0"));
}

// Two tensors that share a parcel, of which the first is read twice.
class PlannedScheduleOfAGroup : public ::testing::Test {
 protected:
  PlannedScheduleOfAGroup() : schedule_(Within(100 * kSize)) {
    StepTrace step = Chain({1, 2, 3});
    step.accesses.insert(step.accesses.begin() + 4, 0);  // 0 1 2 | 2 0 1 0
    step.intervals.emplace_back();
    schedule_.Learn(Planned(
        step, {{.object = 0, .evict_at = 2, .fetch_at = 3, .read_at = 4},
               {.object = 1, .evict_at = 3, .fetch_at = 4, .read_at = 5},
               {.object = 0, .evict_at = 5, .fetch_at = 6, .read_at = 6, .copies_out = false}}));
    for (const uint64_t signature : {1, 2}) schedule_.OnSaved(kScope, {kSize, signature});
    parcel_.place = {kScope, 2};
    parcel_.size_bytes = 2 * kSize;
    parcel_.objects = {0, 1};
  }
  void Leave() {
    const HeldBytes held = {&parcel_, 2 * kSize};
    schedule_.OnLeft(parcel_, {&held, 1});
  }
  ~PlannedScheduleOfAGroup() override { schedule_.OnGone(parcel_); }

  static constexpr ScopeId kScope = 1;
  PlannedSchedule schedule_;
  ScheduledParcel parcel_;
};

TEST_F(PlannedScheduleOfAGroup, TheParcelGoesWithTheFirstThatIsDue) {
  Leave();
  EXPECT_THAT(schedule_.TakeEvictions(), IsEmpty());
  schedule_.OnSaved(kScope, {kSize, 3});
  EXPECT_THAT(schedule_.TakeEvictions(), ElementsAre(&parcel_));
}

TEST_F(PlannedScheduleOfAGroup, TheParcelThatLeavesLateGoesAtOnceIfAnyOfThemIsDue) {
  schedule_.OnSaved(kScope, {kSize, 3});
  EXPECT_THAT(schedule_.TakeEvictions(), IsEmpty());
  Leave();
  EXPECT_THAT(schedule_.TakeEvictions(), ElementsAre(&parcel_));
}

TEST_F(PlannedScheduleOfAGroup, OnceItHasComeBackItStaysForTheOthers) {
  Leave();
  schedule_.OnSaved(kScope, {kSize, 3});
  schedule_.TakeEvictions();
  schedule_.OnUsed(2, AccessKind::kRead);
  schedule_.OnFetched(parcel_, /*backward=*/5);
  schedule_.OnUsed(0, AccessKind::kRead);
  schedule_.OnUsed(1, AccessKind::kRead);
  EXPECT_THAT(schedule_.TakeEvictions(), IsEmpty());
}

// Dropping it once more would need all that is in it.
TEST_F(PlannedScheduleOfAGroup, InAGraphThatIsKeptItDoesNotStayForTheNextBackward) {
  Leave();
  schedule_.OnSaved(kScope, {kSize, 3});
  schedule_.TakeEvictions();
  schedule_.OnUsed(2, AccessKind::kReadAndKept);
  schedule_.OnFetched(parcel_, /*backward=*/5);
  schedule_.OnUsed(0, AccessKind::kReadAndKept);
  EXPECT_FALSE(schedule_.StaysFetched(parcel_));
}

// Two parcels that were fetched ahead. The last reader and the first one share one of them.
TEST(PlannedSchedule, AParcelThatWasFetchedAheadStaysAsLongAsItsFirstReaderNeeds) {
  PlannedSchedule schedule(Within(8 * kSize));
  StepTrace step = Chain({1, 2, 3, 4, 5});
  step.accesses = {0, 1, 2, 3, 4, 4, 3, 1, 2, 0};
  schedule.Learn(
      Planned(std::move(step), {{.object = 0, .evict_at = 3, .fetch_at = 5, .read_at = 9},
                                {.object = 1, .evict_at = 3, .fetch_at = 5, .read_at = 7},
                                {.object = 2, .evict_at = 3, .fetch_at = 5, .read_at = 8}}));
  constexpr ScopeId kScope = 1;
  constexpr int64_t kBackward = 5;
  for (const uint64_t signature : {1, 2, 3}) schedule.OnSaved(kScope, {kSize, signature});
  ScheduledParcel outer, middle;
  for (auto& [parcel, objects] :
       {std::pair<ScheduledParcel&, std::vector<uint32_t>>(outer, {0, 1}), {middle, {2}}}) {
    parcel.place = {kScope, objects.back() + 1};
    parcel.size_bytes = objects.size() * kSize;
    parcel.objects.assign(objects.begin(), objects.end());
    const HeldBytes held = {&parcel, parcel.size_bytes};
    schedule.OnLeft(parcel, {&held, 1});
  }
  for (const uint64_t signature : {4, 5}) schedule.OnSaved(kScope, {kSize, signature});
  ASSERT_THAT(schedule.TakeEvictions(), SizeIs(2));
  schedule.OnBackwardBegin(kBackward);
  schedule.OnUsed(4, AccessKind::kRead);
  const auto is_away = [](const ScheduledParcel&) { return true; };
  for (int i = 0; i < 2; ++i) {
    for (ScheduledParcel* parcel : schedule.TakeFetches({}, kBackward, is_away).parcels) {
      schedule.OnFetched(*parcel, kBackward);
    }
  }
  ASSERT_THAT(schedule.FetchedAhead(), SizeIs(2));
  schedule.OnUsed(3, AccessKind::kRead);
  schedule.OnDeviceBytes(8 * kSize + 1, 0);
  EXPECT_THAT(schedule.TakeEvictions(), ElementsAre(&middle));
  schedule.OnGone(outer);
  schedule.OnGone(middle);
}

TEST(PlannedSchedule, WhatABranchLeavesOutDoesNotDisturbTheRest) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 4}), {{.object = 1, .evict_at = 3, .fetch_at = 5, .read_at = 6},
                                    {.object = 0, .evict_at = 3, .fetch_at = 5, .read_at = 7}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 3, 4});
  player.EndForward();
  EXPECT_THAT(player.Happened(), ElementsAre("stay 1", "out 0", "stay 2", "drop 0"));
  player.Read(2);
  player.Read(1);
  EXPECT_THAT(player.Happened(), ElementsAre("fetch 0"));
  player.Read(0);
}

TEST(PlannedSchedule, WhatIsToBeBackAlreadyIsNotDroppedAnyMore) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 4, 5}), {{.object = 0, .evict_at = 2, .fetch_at = 3, .read_at = 9}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 5});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 1", "out 0", "stay 2"));
}

TEST(PlannedSchedule, AKnownStepRunsAnewEachTime) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.Play({1, 2, 3, 4});
  const std::vector<std::string> first = player.Happened();
  EXPECT_THAT(first, ElementsAre("stay 1", "out 0", "stay 2", "drop 0", "stay 3", "fetch 0"));
  player.Play({1, 2, 3, 4});
  EXPECT_EQ(player.Happened(), first);
}

TEST(PlannedSchedule, WhatABranchSavesAndReadsOnceMoreDoesNotDisturbTheRest) {
  PlannedSchedule schedule(Within(100 * kSize));
  StepTrace step = Chain({1, 2, 3});
  step.accesses = {0, 1, 1, 2,
                   2, 1, 1, 0};  // the second of two operators that save and read tensor 1
  step.intervals.resize(step.accesses.size() + 1);
  step.objects[1].saved_until = 2;
  schedule.Learn(Planned(step, {{.object = 0, .evict_at = 3, .fetch_at = 5, .read_at = 7}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3});
  player.EndForward();
  player.Read(2);
  player.Happened();
  player.Read(1);
  EXPECT_THAT(player.Happened(), ElementsAre("fetch 0"));
  player.Read(0);
  EXPECT_NE(schedule.followed(), nullptr);
}

TEST(PlannedSchedule, WhatNobodyNeedsAnyMoreIsNotFetched) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  player.Release(0);
  player.Happened();
  player.Read(3);
  player.Read(2);
  EXPECT_THAT(player.Happened(), IsEmpty());
}

// --- Bytes actually allocated ---

TEST(PlannedSchedule, WhereMoreIsAllocatedThanWasPlannedTheOldestThatHasLeftGoesEarly) {
  PlannedSchedule schedule(Within(4 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 4, 5}), {{.object = 1, .evict_at = 4, .fetch_at = 6, .read_at = 8},
                                       {.object = 0, .evict_at = 4, .fetch_at = 7, .read_at = 9}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3});
  EXPECT_THAT(player.Happened(), ElementsAre("out 0", "stay 2", "out 1"));
  player.EndStep();
  player.Happened();
  player.SaveAll({1, 2});
  player.SetOtherBytes(1);
  player.Save(3);
  EXPECT_THAT(player.Happened(), ElementsAre("out 0", "stay 2", "out 1", "drop 0"));
}

TEST(PlannedSchedule, WhatIsToComeUntilTheNextUseCountsAsAllocated) {
  PlannedSchedule schedule(Within(4 * kSize));
  StepTrace step = Chain({1, 2, 3});
  step.intervals[2].transient_bytes = kSize;
  schedule.Learn(Planned(step, {{.object = 0, .evict_at = 3, .fetch_at = 5, .read_at = 5}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2});
  player.EndStep();
  EXPECT_THAT(player.Happened(), ElementsAre("stay 1", "out 0"));
  player.SetOtherBytes(1);
  player.SaveAll({1, 2});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 1", "out 0", "drop 0"))
      << "two are there, the third is made, and its operator takes as much again";
}

TEST(PlannedSchedule, AStepThatLeavesUsesOutCountsWhatAnyOfThemTakes) {
  PlannedSchedule schedule(Within(4 * kSize));
  schedule.Learn(MuchBehindTheSecond());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 1", "out 0", "drop 0", "stay 2"))
      << "behind the second one it is four";
  player.EndStep();
  player.Happened();
  player.SaveAll({1, 3});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 1", "out 0", "drop 0"))
      << "what is left out may come, and with it what it takes";
}

TEST(PlannedSchedule, WhatWasLeftOutOfTheStepThatItGoesOnAsCountsToo) {
  PlannedSchedule schedule(Within(4 * kSize));
  schedule.Learn(MuchBehindTheSecond());
  schedule.Learn(Planned(Chain({1, 3}), {}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 3});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 0", "stay 1"));
  player.Save(4);
  EXPECT_THAT(player.Happened(), ElementsAre("stay 2", "out 0", "out 1", "drop 0", "drop 1"))
      << "it leaves 2 out, behind which it is four";
}

TEST(PlannedSchedule, WhereMoreIsAllocatedThanWasPlannedFetchesWait) {
  PlannedSchedule schedule(Within(3 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  player.Read(3);
  player.Release(3);
  player.Happened();
  player.SetOtherBytes(1);
  player.Read(2);
  EXPECT_THAT(player.Happened(), IsEmpty());
  player.SetOtherBytes(0);
  player.Read(1);
  EXPECT_THAT(player.Happened(), ElementsAre("fetch 0"));
}

TEST(PlannedSchedule, FetchesLeaveRoomForWhatIsToComeUntilTheNextUse) {
  PlannedSchedule schedule(Within(4 * kSize));
  StepTrace step = Chain({1, 2, 3, 4});
  step.intervals[6].transient_bytes = 2 * kSize;
  schedule.Learn(Planned(step, {{.object = 0, .evict_at = 2, .fetch_at = 5, .read_at = 7}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  player.Read(3);
  player.Release(3);
  player.Happened();
  player.Read(2);
  EXPECT_THAT(player.Happened(), IsEmpty());
  player.Read(1);
  EXPECT_THAT(player.Happened(), ElementsAre("fetch 0"));
}

TEST(PlannedSchedule, AFetchThatWasRefusedIsAskedForAgain) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 4, 5}), {{.object = 0, .evict_at = 2, .fetch_at = 6, .read_at = 9}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4, 5});
  player.EndForward();
  player.Read(4);
  player.Happened();
  player.RefuseOneFetch();
  player.Read(3);
  EXPECT_THAT(player.Happened(), IsEmpty());
  EXPECT_THAT(schedule.FetchedAhead(), IsEmpty());
  player.Read(2);
  EXPECT_THAT(player.Happened(), IsEmpty())
      << "a refusal is expensive: the next attempt is left out";
  player.Read(1);
  EXPECT_THAT(player.Happened(), ElementsAre("fetch 0"));
}

TEST(PlannedSchedule, ANewBackwardTriesAtOnceWhatWasRefusedInTheOneBefore) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 4, 5}), {{.object = 0, .evict_at = 2, .fetch_at = 6, .read_at = 9}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4, 5});
  player.EndForward();
  player.Read(4);
  player.RefuseOneFetch();
  player.Read(3);
  player.Happened();
  schedule.OnBackwardBegin(TargetPlayer::kBackward + 1);
  player.Read(2);
  EXPECT_THAT(player.Happened(), ElementsAre("fetch 0"));
}

TEST(PlannedSchedule, WithoutATargetInBytesWhatTheProgramHoldsLeavesOnlyByAPlan) {
  PlannedSchedule schedule(TargetOptions{.link = RoundLink()});
  EXPECT_FALSE(schedule.OnSaved(/*scope=*/1, {kSize, /*signature=*/77}).even_if_held);
  schedule.OnReleased(0);
  schedule.Learn(FourTensors());
  EXPECT_TRUE(schedule.OnSaved(/*scope=*/1, {kSize, /*signature=*/1}).even_if_held);
}

TEST(PlannedSchedule, AFetchThatWasDroppedToMakeRoomIsAskedForAgain) {
  PlannedSchedule schedule(Within(3 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  player.Read(3);
  player.Release(3);
  player.Read(2);
  EXPECT_THAT(schedule.FetchedAhead(), SizeIs(1));
  player.Happened();
  player.WantRoom();
  player.Read(1);
  EXPECT_THAT(player.Happened(), ElementsAre("fetch 0"));
}

// --- Recomputable segments ---

// Of the tensors with these signatures. Of two segments the second one is computed again.
std::shared_ptr<const CachedPlan> Mixed(const std::vector<uint64_t>& signatures) {
  StepTrace step = Chain(signatures);
  step.segments.resize(2);
  step.segments[1].is_recomputed = true;
  return Planned(step, {});
}

TEST(PlannedSchedule, SegmentsAreComputedAgainAsTheKnownStepSays) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(Mixed({1, 2}));
  TargetPlayer player(schedule);
  player.Save(1);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), std::nullopt);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 2u);
}

// The same, where the first segment begins before anything is saved; `again` are computed again.
std::shared_ptr<const CachedPlan> EarlyMixed(const std::vector<uint64_t>& signatures,
                                             const std::vector<bool>& again,
                                             std::vector<uint32_t> recompute_set = {}) {
  StepTrace step = Chain(signatures);
  step.early_segments = 1;
  step.segments.resize(again.size());
  for (size_t i = 0; i < again.size(); ++i) step.segments[i].is_recomputed = again[i];
  return std::make_shared<const CachedPlan>(step, StepPlan(), absl::OkStatus(),
                                            std::move(recompute_set));
}

TEST(PlannedSchedule, ASegmentThatAStepBeginsWithIsComputedAgainAsTheLikelyStepSays) {
  PlannedSchedule schedule(Within(100 * kSize));
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u) << "nothing is known";
  EXPECT_TRUE(schedule.HasBegun());
  EXPECT_FALSE(schedule.IsInStep());
  TargetPlayer player(schedule);
  player.Save(1);
  player.EndStep();
  schedule.Learn(EarlyMixed({5, 6}, {true, false}));
  for (int step = 0; step < 2; ++step) {
    EXPECT_EQ(schedule.OnSegment(/*scope=*/1), std::nullopt);
    player.Save(5);
    EXPECT_NE(schedule.followed(), nullptr);
    EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 1u);
    player.EndStep();
    const RecomputeTrials::SegmentLog log = schedule.TakeSegmentLog();
    EXPECT_THAT(log.is_recomputed, ElementsAre(true, false));
    EXPECT_EQ(log.early, 1u);
  }
}

TEST(PlannedSchedule, ASegmentThatAStepBeginsWithIsThatOfAStepThatAddsToGradientsAsWell) {
  PlannedSchedule schedule(Within(100 * kSize));
  StepTrace adds = EarlyMixed({5, 6}, {true, false})->step();
  adds.begins_with_gradients = true;
  schedule.Learn(Planned(adds, {}));
  schedule.Learn(EarlyMixed({5, 6}, {false, false}));
  TargetPlayer player(schedule);
  for (const bool begins_with_gradients : {false, true}) {
    schedule.set_begins_with_gradients(begins_with_gradients);
    EXPECT_EQ(schedule.OnSegment(/*scope=*/1).has_value(), !begins_with_gradients);
    player.Save(5);
    ASSERT_NE(schedule.followed(), nullptr);
    EXPECT_EQ(schedule.followed()->step().begins_with_gradients, begins_with_gradients);
    player.EndStep();
  }
}

TEST(PlannedSchedule, WhereAnotherStepThanTheLikelyOneBeginsWithASegmentSuchOnesAreKept) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(EarlyMixed({5, 6}, {true, false}));
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), std::nullopt);
  TargetPlayer player(schedule);
  player.Save(7);
  EXPECT_EQ(schedule.followed(), nullptr);
  EXPECT_THAT(schedule.cached(), IsEmpty());
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 1u);
  player.EndStep();
  schedule.Learn(EarlyMixed({5, 6}, {true, false}));
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u);
  player.Save(7);
  StepTrace record = Chain({7});
  record.segments.resize(1);
  record.segments[0].before.emplace();
  RecomputeTrials::Note(schedule.TakeSegmentLog(), record);
  EXPECT_FALSE(record.segments[0].before.has_value()) << "no mix has it";
}

TEST(PlannedSchedule, AMixIsTriedFromTheFirstSegmentOn) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(EarlyMixed({1, 2}, {false, false}, /*mix=*/{0}));
  TargetPlayer player(schedule);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u) << "it would not be recorded";
  player.Save(1);
  EXPECT_NE(schedule.followed(), nullptr);
  player.EndStep();
  schedule.set_is_recorded(true);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), std::nullopt);
  player.Save(5);
  EXPECT_EQ(schedule.followed(), nullptr) << "nobody knows what it takes";
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 1u);
  player.EndStep();
  const RecomputeTrials::SegmentLog log = schedule.TakeSegmentLog();
  ASSERT_NE(log.tried, nullptr);
  EXPECT_THAT(log.is_recomputed, ElementsAre(true, false));
}

TEST(PlannedSchedule, AStepThatBeginsWithASegmentIsAnotherThanOneThatDoesNot) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(EarlyMixed({1, 2}, {false, false}));
  TargetPlayer player(schedule);
  player.Save(1);
  EXPECT_EQ(schedule.followed(), nullptr);
  player.EndStep();
  schedule.Learn(Mixed({1, 2}));
  EXPECT_THAT(schedule.cached(), SizeIs(2));
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u) << "the likely one begins without a segment";
}

TEST(PlannedSchedule, KindsInTurnsThatComputeTheirFirstSegmentAgainAreNotForgotten) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(EarlyMixed({5, 6}, {true, false}));
  schedule.Learn(EarlyMixed({7, 8}, {true, false}));
  TargetPlayer player(schedule);
  for (const uint64_t signature : {5, 7, 7, 5, 5, 7}) {
    EXPECT_EQ(schedule.OnSegment(/*scope=*/1), std::nullopt);
    player.Save(signature);
    EXPECT_NE(schedule.followed(), nullptr);
    player.EndStep();
  }
  EXPECT_THAT(schedule.cached(), SizeIs(2));
}

TEST(PlannedSchedule, TheStepThatRanLastIsTakenToComeNext) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(Mixed({1, 2}));
  schedule.Learn(EarlyMixed({5, 6}, {true, false}));
  TargetPlayer player(schedule);
  player.Save(1);
  player.EndStep();
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u) << "the last one began without a segment";
  player.Save(5);
  player.EndStep();
  EXPECT_THAT(schedule.cached(), SizeIs(2)) << "nothing was wrong with either";
}

TEST(PlannedSchedule, SegmentsOfAScopeThatSavesNothingAreNoneOfTheNextStep) {
  PlannedSchedule schedule(Within(100 * kSize));
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u);
  schedule.OnScopeEnd(2);
  EXPECT_TRUE(schedule.HasBegun()) << "it was another scope's end";
  EXPECT_EQ(schedule.OnSegment(/*scope=*/2), 1u);
  schedule.OnScopeEnd(1);
  EXPECT_FALSE(schedule.HasBegun());
  TargetPlayer player(schedule);
  player.Save(1);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u);
  schedule.OnScopeEnd(1);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 1u) << "the step goes on";
}

TEST(PlannedSchedule, AMixedStepThatAnotherOneBeginsLikeIsForgotten) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(Mixed({1, 2}));
  TargetPlayer player(schedule);
  player.Save(1);
  schedule.OnSegment(/*scope=*/1);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), std::nullopt);
  player.Save(7);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 2u) << "what comes now is kept";
  EXPECT_THAT(schedule.cached(), IsEmpty());
}

TEST(PlannedSchedule, AMixedStepThatIsLeftBeforeItHasMixedIsKept) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(Mixed({1, 2}));
  TargetPlayer player(schedule);
  player.Save(1);
  schedule.OnSegment(/*scope=*/1);
  player.Save(7);
  EXPECT_THAT(schedule.cached(), SizeIs(1));
}

TEST(PlannedSchedule, AMixIsTriedByAStepThatIsRecorded) {
  PlannedSchedule schedule(Within(100 * kSize));
  StepTrace step = Chain({1, 2});
  step.segments.resize(2);
  schedule.Learn(std::make_shared<const CachedPlan>(step, StepPlan(), absl::OkStatus(),
                                                    std::vector<uint32_t>{1}));
  TargetPlayer player(schedule);
  player.Save(1);
  EXPECT_NE(schedule.followed(), nullptr);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 1u);
  player.EndStep();
  schedule.set_is_recorded(true);
  player.Save(1);
  EXPECT_EQ(schedule.followed(), nullptr) << "nobody knows what it takes";
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), std::nullopt);
  player.EndStep();
  const RecomputeTrials::SegmentLog log = schedule.TakeSegmentLog();
  EXPECT_EQ(log.tried->recompute_set().size(), 1u);
  EXPECT_THAT(log.is_recomputed, ElementsAre(false, true));
}

// With segments, all of which are kept, and this mix.
std::shared_ptr<const CachedPlan> WithMix(const std::vector<uint64_t>& signatures,
                                          std::vector<uint32_t> recompute_set) {
  StepTrace step = Chain(signatures);
  step.segments.resize(2);
  return std::make_shared<const CachedPlan>(step, StepPlan(), absl::OkStatus(),
                                            std::move(recompute_set));
}

TEST(PlannedSchedule, StepsAreWorthRecordingUntilTheMixOfEachKindWasTried) {
  PlannedSchedule schedule(Within(100 * kSize));
  const std::shared_ptr<const CachedPlan> kinds[] = {WithMix({1, 2}, {0}), WithMix({5, 6}, {1})};
  for (const auto& kind : kinds) schedule.Learn(kind);
  TargetPlayer player(schedule);
  for (int turn = 0; turn < PlannedSchedule::kKnownInARow; ++turn) {
    player.Play({1, 2});
    player.Play({5, 6});
  }
  EXPECT_TRUE(schedule.WantsRecord());
  schedule.Learn(kinds[0]->WithRecomputeTried());
  EXPECT_TRUE(schedule.WantsRecord());
  schedule.Learn(kinds[1]->WithRecomputeTried());
  EXPECT_FALSE(schedule.WantsRecord());
}

TEST(PlannedSchedule, StepsAreWorthRecordingUntilEachKindWasSeenToHaveNoMix) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(WithMix({1, 2}, {}));
  TargetPlayer player(schedule);
  for (int step = 0; step < PlannedSchedule::kKnownInARow; ++step) player.Play({1, 2});
  EXPECT_TRUE(schedule.WantsRecord());
  schedule.Learn(WithMix({1, 2}, {}));  // as if it ran as planned
  EXPECT_FALSE(schedule.WantsRecord());
}

TEST(PlannedSchedule, WhereAnotherKindBeginsAlikeNoMixIsTried) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(WithMix({1, 2}, {0}));
  schedule.Learn(WithMix({1, 3}, {0}));
  schedule.set_is_recorded(true);
  TargetPlayer player(schedule);
  player.Save(1);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u);
  player.EndStep();
  EXPECT_EQ(schedule.TakeSegmentLog().tried, nullptr);
}

TEST(PlannedSchedule, AKindWithAMixThatDoesNotComeIsNotWaitedForForEver) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(WithMix({1, 2}, {0}));
  schedule.Learn(Planned(Chain({5, 6}), {}));
  TargetPlayer player(schedule);
  for (int step = 0; step < PlannedSchedule::kKnownInARowForRecompute; ++step) {
    EXPECT_TRUE(schedule.WantsRecord()) << step;
    player.Play({5, 6});
  }
  EXPECT_FALSE(schedule.WantsRecord());
}

// --- A step that is not the expected one ---

TEST(PlannedSchedule, AStepGoesOnAsTheKnownOneThatBeginsLikeIt) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 7, 3, 4}), {{.object = 1, .evict_at = 4, .fetch_at = 8, .read_at = 8}}));
  schedule.Learn(
      Planned(Chain({1, 2, 7, 5, 6}), {{.object = 0, .evict_at = 3, .fetch_at = 8, .read_at = 9}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 7});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 1", "out 0", "stay 2"));
  player.Save(3);
  EXPECT_THAT(player.Happened(), ElementsAre("stay 3", "out 1"))
      << "what has stayed and moves in this one leaves";
  player.Save(4);
  EXPECT_THAT(player.Happened(), ElementsAre("stay 4", "drop 1"))
      << "what has left and would have stayed is not dropped";
}

TEST(PlannedSchedule, AStepThatSavesInAnotherOrderIsWhereItsLastUseIs) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({3, 1, 2}), {{.object = 1, .evict_at = 2, .fetch_at = 4, .read_at = 4}}));
  schedule.Learn(Planned(Chain({1, 2, 4}), {}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 0", "stay 1"));
  player.Save(3);
  EXPECT_THAT(player.Happened(), ElementsAre("stay 2", "out 0", "drop 0"));
}

TEST(PlannedSchedule, WhatWasSavedBeforeWithTheSameSignatureIsCountedInTheOtherStep) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 1, 3}), {{.object = 1, .evict_at = 2, .fetch_at = 4, .read_at = 4}}));
  schedule.Learn(Planned(Chain({1, 1, 4}), {}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 1, 3});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 0", "stay 1", "stay 2", "out 1", "drop 1"));
}

TEST(PlannedSchedule, WhatWasDueInTheStepThatWasThoughtIsNotDueAnyMore) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 9}), {{.object = 0, .evict_at = 5, .fetch_at = 6, .read_at = 7}}));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.HoldBack();
  player.SaveAll({1, 2, 3, 9});
  player.EndForward();
  EXPECT_THAT(player.Happened(), ElementsAre("stay 1", "stay 2", "stay 3", "out 0"));
}

TEST(PlannedSchedule, WhatHasStayedLeavesLateOnlyOnce) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3}), {{.object = 0, .evict_at = 3, .fetch_at = 5, .read_at = 5}}));
  schedule.Learn(Planned(Chain({1, 2, 4}), {}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 0", "stay 1", "stay 2", "out 0"));
  player.Save(9);
  EXPECT_THAT(player.Happened(), ElementsAre("out 1", "out 2", "drop 0", "drop 1", "drop 2"));
}

TEST(PlannedSchedule, OfSeveralThatBeginAlikeTheOneThatWasFollowedLastIsTriedFirst) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(Planned(Chain({1, 2, 3}), {}));
  schedule.Learn(
      Planned(Chain({1, 2, 5}), {{.object = 0, .evict_at = 2, .fetch_at = 4, .read_at = 5}}));
  TargetPlayer player(schedule);
  player.Save(1);
  EXPECT_THAT(player.Happened(), IsEmpty()) << "it leaves";
  player.SaveAll({2, 3});
  player.EndStep();
  player.Happened();
  player.Save(1);
  EXPECT_THAT(player.Happened(), ElementsAre("stay 0"));
}

TEST(PlannedSchedule, OfSeveralThatBeginAlikeTheOneThatCameAfterTheLastStepBeforeIsTriedFirst) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(Planned(Chain({1, 2, 3}), {}));
  schedule.Learn(Planned(Chain({1, 2, 5}), {}));
  TargetPlayer player(schedule);
  const auto begins_as = [&](uint64_t third) {
    player.Save(1);
    const uint64_t found = schedule.followed()->step().objects[2].signature;
    player.SaveAll({2, third});
    player.EndStep();
    return found == third;
  };
  begins_as(3);
  begins_as(5);
  begins_as(3);
  EXPECT_TRUE(begins_as(5));
  EXPECT_TRUE(begins_as(3));
  EXPECT_FALSE(begins_as(3)) << "another one came after it";
  EXPECT_TRUE(begins_as(3));
  player.Save(9);
  player.EndStep();
  EXPECT_TRUE(begins_as(3)) << "after one that is not known, the last one that was followed";
}

TEST(PlannedSchedule, WhenAStepTurnsOutToBeUnknownWhatHasStayedLeaves) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3});
  player.Happened();
  player.Save(9);
  EXPECT_THAT(player.Happened(), ElementsAre("out 1", "out 2", "drop 1", "drop 2"));
  player.EndForward();
  EXPECT_THAT(player.Happened(), ElementsAre("out 3", "drop 3"));
}

TEST(PlannedSchedule, AnUnknownStepThatNeverEndsGivesNumbersOutAgain) {
  PlannedSchedule schedule(Within(100 * kSize));
  const uint32_t kept = schedule.OnSaved(1, {kSize, 1}).object;
  for (uint64_t i = 0; i < 1000; ++i) {
    const SaveDecision decision = schedule.OnSaved(1, {kSize, 2 + i});
    EXPECT_EQ(decision.object, kept + 1);
    schedule.OnReleased(decision.object);
  }
}

TEST(PlannedSchedule, AnUnknownStepTakesTheLeastMemoryHoweverMuchThereIs) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(Planned(Chain({1, 2}), {}));
  TargetPlayer player(schedule);
  player.SaveAll({7, 8, 9});
  player.EndForward();
  EXPECT_THAT(player.Happened(),
              ElementsAre("out 0", "drop 0", "out 1", "drop 1", "out 2", "drop 2"));
  player.Read(2);
  player.Read(1);
  EXPECT_THAT(player.Happened(), ElementsAre("demand 2", "drop 2", "demand 1"))
      << "who read it has it, and nobody else may for long";
}

TEST(PlannedSchedule, WhatIsComputedAgainKeepsNobodyFromComingBackAhead) {
  StepTrace step = Chain({1, 2, 3});
  step.objects[1].recast_us = 1;
  std::vector<IdleInterval> idle_intervals = IdleIntervalsOf(step);  // of the first two
  ASSERT_EQ(idle_intervals.size(), 2u);
  for (IdleInterval& idle : idle_intervals) {
    idle.away_from = idle.first;
    idle.away_until = idle.last;
  }
  idle_intervals[0].away_until = 3;
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(Planned(step, MovesOf(step, idle_intervals)));
  TargetPlayer player(schedule);
  player.Save(1);
  player.Save(2, kSize, TargetPlayer::kOwnOperator, /*frees=*/true, /*is_recomputed=*/true);
  player.Save(3);
  player.EndForward();
  EXPECT_THAT(player.Happened(), ElementsAre("out 0", "drop 0", "stay 2"));
  player.Read(2);
  player.Read(1);
  EXPECT_THAT(player.Happened(), ElementsAre("fetch 0", "compute 1"));
}

// --- A step whose reads differ ---

TEST(PlannedSchedule, AStepThatReadsMoreOftenThanTheKnownOneGoesOnLikeTheFirst) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  player.Read(3);
  player.Read(2);
  EXPECT_NE(schedule.followed(), nullptr);
  player.Happened();
  player.Read(3);
  EXPECT_EQ(schedule.followed(), nullptr);
  EXPECT_THAT(player.Happened(), ElementsAre("out 1", "out 2", "out 3", "drop 1", "drop 2",
                                             "drop 3", "drop 0", "demand 3"))
      << "what has stayed leaves, and what was fetched ahead goes";
}

TEST(PlannedSchedule, AStepThatReadsInAnotherOrderGoesOnLikeTheFirst) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  player.Read(2);
  EXPECT_EQ(schedule.followed(), nullptr) << "tensor 3 was to be read first";
}

TEST(PlannedSchedule, AReadOfWhatNobodyNeedsAnyMoreIsNotMissed) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  player.Release(3);
  player.Read(2);
  EXPECT_NE(schedule.followed(), nullptr);
}

TEST(PlannedSchedule, AStepThatKeepsTheGraphThatTheKnownOneLetsGoOfGoesOnLikeTheFirst) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  player.Happened();
  player.ReadAndKeep(3);
  EXPECT_EQ(schedule.followed(), nullptr);
  EXPECT_THAT(player.Happened(),
              ElementsAre("out 1", "out 2", "out 3", "drop 1", "drop 2", "drop 3", "demand 3"));
}

TEST(PlannedSchedule, AStepWhoseBackwardMakesAGraphGoesOnLikeTheFirst) {
  PlannedSchedule schedule(Within(100 * kSize));
  StepTrace step = Chain({1, 2, 3});
  for (StepObject& object : step.objects) object.needed_until = 6;
  schedule.Learn(Planned(step, {}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3});
  player.EndForward();
  player.ReadAndKeep(2);
  EXPECT_NE(schedule.followed(), nullptr);
  player.Read(1, TargetPlayer::kOwnOperator, AccessKind::kReadIntoGraph);
  EXPECT_EQ(schedule.followed(), nullptr);
}

TEST(PlannedSchedule, AStepInWhichSomethingIsNeededLongerGoesOnLikeTheFirst) {
  PlannedSchedule schedule(Within(100 * kSize));
  StepTrace step = Chain({1, 2, 3, 4});
  step.objects[3].needed_until = 5;
  schedule.Learn(Planned(step, {}));
  for (const bool is_released : {true, false}) {
    TargetPlayer player(schedule);
    player.SaveAll({1, 2, 3, 4});
    player.EndForward();
    player.Read(3);
    EXPECT_NE(schedule.followed(), nullptr);
    if (is_released) player.Release(3);
    player.Read(2);
    EXPECT_EQ(schedule.followed() != nullptr, is_released);
    player.EndStep();
  }
}

// Its graph is kept and read twice: uses 4 to 7, and in the same order 8 to 11.
std::shared_ptr<const CachedPlan> FourTensorsReadTwice(std::vector<StepMove> moves) {
  StepTrace step = Chain({1, 2, 3, 4});
  for (uint32_t object = 4; object-- > 0;) {
    step.objects[object].needed_until = 12 - object;
    step.accesses.push_back(object);
  }
  step.intervals.resize(step.accesses.size() + 1);
  return Planned(std::move(step), std::move(moves));
}

TEST(PlannedSchedule, AStepGoesOnAsTheKnownOneThatReadsLikeIt) {
  PlannedSchedule schedule(Within(100 * kSize));
  const auto twice =
      FourTensorsReadTwice({{.object = 1, .evict_at = 3, .fetch_at = 6, .read_at = 6}});
  const auto once = FourTensors();
  schedule.Learn(twice);
  schedule.Learn(once);
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  EXPECT_EQ(schedule.followed(), once);
  player.Happened();
  player.ReadAndKeep(3);
  EXPECT_EQ(schedule.followed(), twice);
  EXPECT_THAT(player.Happened(), ElementsAre("out 1", "drop 1"));
  player.EndStep();
  player.Save(1);
  EXPECT_EQ(schedule.followed(), twice) << "that was followed last";
}

TEST(PlannedSchedule, WhatIsFetchedForTheNextBackwardStaysAtTheEndOfThisOne) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensorsReadTwice({{.object = 0, .evict_at = 2, .fetch_at = 7, .read_at = 7},
                                       {.object = 3, .evict_at = 5, .fetch_at = 7, .read_at = 8}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  for (const size_t number : {3, 2, 1}) player.ReadAndKeep(number);
  player.Happened();
  player.ReadAndKeep(0);
  EXPECT_THAT(player.Happened(), ElementsAre("demand 0", "fetch 3"));
  EXPECT_THAT(schedule.FetchedIn(TargetPlayer::kBackward), IsEmpty()) << "it reads both again";
  player.Save(9);
  EXPECT_EQ(schedule.followed(), nullptr);
  EXPECT_THAT(schedule.FetchedIn(TargetPlayer::kBackward), SizeIs(2)) << "no plan counts on them";
}

// Object 0 is fetched for the first backward and stays for the second. Object 3 leaves in between.
TEST(PlannedSchedule, WhatHasComeBackInAGraphThatIsKeptStaysUnlessThePlanDropsIt) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensorsReadTwice({{.object = 3, .evict_at = 3, .fetch_at = 4, .read_at = 4},
                                       {.object = 0, .evict_at = 2, .fetch_at = 6, .read_at = 7},
                                       {.object = 3, .evict_at = 5, .fetch_at = 7, .read_at = 8}}));
  TargetPlayer player(schedule);
  const auto stays = [&](size_t number) { return schedule.StaysFetched(player.parcel(number)); };
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  player.ReadAndKeep(3);
  EXPECT_FALSE(stays(3));
  for (const size_t number : {2, 1, 0}) player.ReadAndKeep(number);
  EXPECT_TRUE(stays(0));
  EXPECT_THAT(schedule.FetchedIn(TargetPlayer::kBackward), IsEmpty()) << "all are for the second";
  EXPECT_THAT(schedule.FetchedAhead(), SizeIs(2)) << "they may go where there is no room";
  for (const size_t number : {3, 2, 1}) {
    player.Read(number);
    player.Release(number);
  }
  player.Read(0);
  ASSERT_NE(schedule.followed(), nullptr);
  EXPECT_FALSE(stays(0)) << "nobody reads it again";
}

TEST(PlannedSchedule, WhatItsReaderIsAboutToReadStaysHoweverLittleRoomThereIs) {
  PlannedSchedule schedule(Within(4 * kSize));
  schedule.Learn(FourTensorsReadTwice({{.object = 1, .evict_at = 3, .fetch_at = 5, .read_at = 6}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  for (const size_t number : {3, 2}) player.ReadAndKeep(number);
  EXPECT_THAT(player.Happened(), Contains("fetch 1"));
  player.SetOtherBytes(2 * kSize);
  player.ReadAndKeep(1);
  EXPECT_TRUE(schedule.StaysFetched(player.parcel(1)));
  EXPECT_THAT(player.Happened(), ElementsAre("out 2", "out 3", "drop 2", "drop 3"));
}

TEST(PlannedSchedule, WhatWasFetchedAheadGoesAgainWhereMoreIsAllocatedThanWasPlanned) {
  PlannedSchedule schedule(Within(4 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  for (const size_t number : {3, 2}) {
    player.Read(number);
    player.Release(number);
  }
  EXPECT_THAT(player.Happened(), Contains("fetch 0"));
  player.SetOtherBytes(3 * kSize);
  player.Read(1);
  EXPECT_THAT(player.Happened(), ElementsAre("drop 0")) << "not the one that is about to be read";
  player.Release(1);
  player.SetOtherBytes(0);
  player.Read(0);
  EXPECT_THAT(player.Happened(), ElementsAre("demand 0"));
}

TEST(PlannedSchedule, OfWhatWasFetchedAheadTheLastToBeReadGoesFirst) {
  PlannedSchedule schedule(Within(6 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 4, 5}), {{.object = 0, .evict_at = 4, .fetch_at = 5, .read_at = 9},
                                       {.object = 1, .evict_at = 4, .fetch_at = 5, .read_at = 8}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4, 5});
  player.EndForward();
  player.Read(4);
  player.Release(4);
  player.Read(3);
  player.Release(3);
  ASSERT_THAT(player.Happened(), IsSupersetOf({"fetch 0", "fetch 1"}));
  player.SetOtherBytes(4 * kSize);
  player.Read(2);
  EXPECT_THAT(player.Happened(), ElementsAre("drop 0"));
}

TEST(PlannedSchedule, WhatWentAgainIsFetchedAheadOnceMoreWhenThereIsRoom) {
  PlannedSchedule schedule(Within(6 * kSize));
  schedule.Learn(Planned(Chain({1, 2, 3, 4, 5, 6}),
                         {{.object = 0, .evict_at = 2, .fetch_at = 7, .read_at = 11}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4, 5, 6});
  player.EndForward();
  player.Read(5);
  player.Release(5);
  player.Read(4);
  player.Release(4);
  EXPECT_THAT(player.Happened(), Contains("fetch 0"));
  player.SetOtherBytes(3 * kSize);
  player.Read(3);
  player.Release(3);
  EXPECT_THAT(player.Happened(), ElementsAre("drop 0"));
  player.SetOtherBytes(0);
  player.Read(2);
  EXPECT_THAT(player.Happened(), ElementsAre("fetch 0"));
}

TEST(PlannedSchedule, WhatNobodyReadsAnyMoreLeavesFirst) {
  PlannedSchedule schedule(Within(3 * kSize));
  StepTrace step = Chain({1, 2, 3});
  // Its first object is needed to the end, and not read.
  step.accesses.pop_back();
  step.operators.resize(step.operators.empty() ? 0 : step.accesses.size());
  step.intervals.pop_back();
  step.objects[0].needed_until = 5;
  schedule.Learn(Planned(std::move(step), {}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3});
  player.EndForward();
  EXPECT_THAT(player.Happened(), Not(Contains("out 0")));
  player.SetOtherBytes(kSize);
  player.Read(2);
  EXPECT_THAT(player.Happened(), ElementsAre("out 0", "drop 0"));
}

TEST(PlannedSchedule, WeightsThatVisitGiveWayToWhatWasPlanned) {
  PlannedSchedule schedule(Within(4 * kSize));
  StepPlan plan;
  plan.peak_bytes = 4 * kSize;
  schedule.Learn(std::make_shared<const CachedPlan>(Chain({1, 2, 3, 4}), plan));
  TargetPlayer player(schedule);
  player.SetVisitingBytes(kSize);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  EXPECT_THAT(player.Happened(), ElementsAre("stay 0", "stay 1", "stay 2", "stay 3"));
  player.SetOtherBytes(kSize);
  player.Read(3);
  EXPECT_THAT(player.Happened(), ElementsAre("out 0", "drop 0")) << "but not to what was not";
}

// First what is used last.
TEST(PlannedSchedule, WhatHasStayedForTheNextBackwardGoesWhereMoreIsAllocatedThanWasPlanned) {
  PlannedSchedule schedule(Within(4 * kSize));
  schedule.Learn(FourTensorsReadTwice({{.object = 1, .evict_at = 3, .fetch_at = 5, .read_at = 6},
                                       {.object = 0, .evict_at = 2, .fetch_at = 6, .read_at = 7}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  for (const size_t number : {3, 2, 1, 0}) player.ReadAndKeep(number);
  ASSERT_TRUE(schedule.StaysFetched(player.parcel(0)));
  ASSERT_TRUE(schedule.StaysFetched(player.parcel(1)));
  player.Happened();
  player.SetOtherBytes(kSize);
  player.Read(3);
  EXPECT_NE(schedule.followed(), nullptr);
  EXPECT_THAT(player.Happened(), ElementsAre("drop 0"));
  EXPECT_EQ(player.device_bytes(), 4 * kSize);
  player.Release(3);
  player.Read(2);
  EXPECT_THAT(player.Happened(), IsEmpty());
}

// Its graph is not kept: what its second reader, which a branch has left out, would have read.
TEST(PlannedSchedule, WhatASecondReaderHasNotReadGoesAtTheEndOfTheBackward) {
  PlannedSchedule schedule(Within(100 * kSize));
  StepTrace step = Chain({1, 2, 3, 4});
  step.accesses.push_back(0);
  step.intervals.resize(step.accesses.size() + 1);
  schedule.Learn(Planned(step, {{.object = 0, .evict_at = 2, .fetch_at = 6, .read_at = 7}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  for (const size_t number : {3, 2, 1, 0}) player.Read(number);
  ASSERT_NE(schedule.followed(), nullptr);
  EXPECT_THAT(schedule.FetchedIn(TargetPlayer::kBackward), SizeIs(1));
}

TEST(PlannedSchedule, WhatHasStayedForTheNextBackwardGoesWhenTheStepTurnsOutToBeUnknown) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensorsReadTwice({{.object = 0, .evict_at = 2, .fetch_at = 6, .read_at = 7}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  for (const size_t number : {3, 2, 1, 0}) {
    player.ReadAndKeep(number);
  }
  ASSERT_TRUE(schedule.StaysFetched(player.parcel(0)));
  player.Happened();
  player.Save(9);
  ASSERT_EQ(schedule.followed(), nullptr);
  EXPECT_THAT(player.Happened(), Contains("drop 0"));
  EXPECT_FALSE(schedule.StaysFetched(player.parcel(0)));
}

TEST(PlannedSchedule, AStepThatReadsOtherwiseMakesTheNextThreeWorthRecording) {
  PlannedSchedule schedule(Within(3 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  for (int step = 0; step < PlannedSchedule::kKnownInARow; ++step) player.Play({1, 2, 3, 4});
  ASSERT_FALSE(schedule.WantsRecord());
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  for (const size_t number : {3, 2, 3}) player.Read(number);
  player.EndStep();
  EXPECT_TRUE(schedule.WantsRecord());
}

TEST(PlannedSchedule, OfThoseThatBeginLikeItAStepGoesOnAsOneThatFitsIntoTheTarget) {
  PlannedSchedule schedule(Within(100 * kSize));
  const auto once = FourTensors();
  schedule.Learn(once);
  StepTrace twice = FourTensorsReadTwice({})->step();
  schedule.Learn(std::make_shared<const CachedPlan>(std::move(twice), StepPlan(),
                                                    absl::ResourceExhaustedError("too little")));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  EXPECT_EQ(schedule.followed(), once);
}

// --- The plan cache ---

TEST(PlannedSchedule, StepsThatSaveTheSameAndReadItOtherwiseAreKeptSideBySide) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensors());
  schedule.Learn(FourTensorsReadTwice({}));
  EXPECT_THAT(schedule.cached(), SizeIs(2));
  StepTrace kept = Chain({1, 2, 3, 4});
  kept.objects[3].needed_until = 8;
  schedule.Learn(Planned(kept, {}));
  EXPECT_THAT(schedule.cached(), SizeIs(3));
  StepTrace in_their_order = Chain({1, 2, 3, 4});
  in_their_order.accesses = {0, 1, 2, 3, 0, 1, 2, 3};
  schedule.Learn(Planned(in_their_order, {}));
  EXPECT_THAT(schedule.cached(), SizeIs(4));
}

TEST(PlannedSchedule, TheStepsThatWereFollowedLastAreKept) {
  PlannedSchedule schedule(Within(100 * kSize));
  for (uint64_t signature = 1; signature <= PlannedSchedule::kMaxCached; ++signature) {
    schedule.Learn(Planned(Chain({signature}), {}));
  }
  TargetPlayer(schedule).Play({1});
  EXPECT_EQ(FirstSignatures(schedule).front(), 1u);
  schedule.Learn(Planned(Chain({1000}), {}));
  const std::vector<uint64_t> kept = FirstSignatures(schedule);
  EXPECT_THAT(kept, SizeIs(PlannedSchedule::kMaxCached));
  EXPECT_EQ(kept[0], 1000u);
  EXPECT_EQ(kept[1], 1u);
  EXPECT_EQ(kept.back(), 3u) << "2 is forgotten";
}

TEST(PlannedSchedule, AStepThatSavesAndReadsTheSameTakesThePlaceOfTheOneBefore) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensors());
  schedule.Learn(Planned(Chain({1, 2}), {}));
  const std::shared_ptr<const CachedPlan> again = Planned(Chain({1, 2, 3, 4}), {});
  schedule.Learn(again);
  EXPECT_THAT(schedule.cached(), SizeIs(2));
  EXPECT_TRUE(schedule.cached().front()->IsLike(again->step()));
}

TEST(PlannedSchedule, AStepWhoseTensorsFreeOthersIsAnotherOne) {
  PlannedSchedule schedule(Within(100 * kSize));
  StepTrace step = Chain({1, 2});
  schedule.Learn(Planned(step, {}));
  step.objects[1].frees = false;
  schedule.Learn(Planned(step, {}));
  EXPECT_THAT(schedule.cached(), SizeIs(2));
}

// --- Planning ---

TEST(PlannedSchedule, APlanKeepsWithinTheTarget) {
  const PlannedSchedule schedule(Within(3 * kSize));
  const std::shared_ptr<const CachedPlan> cached = schedule.Plan(Chain({1, 2, 3, 4})).value();
  EXPECT_EQ(cached->plan().peak_bytes, 3 * kSize);
  EXPECT_THAT(cached->shortfall(), IsOk());
}

TEST(PlannedSchedule, WhereTheTargetCannotBeMetThePlanIsTheLeastAndSaysWhy) {
  const PlannedSchedule schedule(Within(kSize));
  const StepTrace step = Chain({1, 2, 3, 4});
  const std::shared_ptr<const CachedPlan> cached = schedule.Plan(step).value();
  EXPECT_EQ(cached->plan().peak_bytes, LeastMemoryBytes(step).value());
  EXPECT_THAT(cached->shortfall(),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("does not fit")));
}

TEST(PlannedSchedule, OfATargetIsSetAsideAsMuchAsIsEnoughIfTheStepLeavesIt) {
  const StepTrace step = Chain({1, 2, 3, 4});
  const uint64_t least_bytes = LeastMemoryBytes(step).value();
  const SetAside aside = {.least_bytes = kSize, .enough_bytes = 2 * kSize};
  // Room for `enough_bytes` and two objects, for `enough_bytes`, and for more than `least_bytes`.
  for (const uint64_t beside_bytes : {4 * kSize, 2 * kSize, kSize + kSize / 2}) {
    const PlannedSchedule schedule(Within(least_bytes + beside_bytes));
    const auto cached = schedule.Plan(step, /*mixes=*/false, aside).value();
    EXPECT_THAT(cached->shortfall(), IsOk());
    const uint64_t aside_bytes = std::min(beside_bytes, aside.enough_bytes);
    EXPECT_LE(cached->plan().peak_bytes, least_bytes + beside_bytes - aside_bytes);
    EXPECT_GT(cached->plan().peak_bytes, least_bytes + beside_bytes - aside_bytes - kSize);
  }
}

TEST(PlannedSchedule, OfATargetAMarginStaysFreeWhereTheStepCanDoWithoutIt) {
  const StepTrace step = Chain({1, 2, 3, 4});
  const uint64_t least_bytes = LeastMemoryBytes(step).value();
  for (const uint64_t beside_bytes : {2 * kSize, kSize / 2, uint64_t{0}}) {
    const PlannedSchedule schedule(Within(least_bytes + beside_bytes));
    const auto cached = schedule.Plan(step, /*mixes=*/false, {}, /*margin_bytes=*/kSize).value();
    EXPECT_THAT(cached->shortfall(), IsOk());
    EXPECT_LE(cached->plan().peak_bytes, std::max(least_bytes, least_bytes + beside_bytes - kSize));
    EXPECT_EQ(cached->memory_bytes(), least_bytes + beside_bytes) << "what it is judged by";
  }
}

TEST(PlannedSchedule, WhatIsSetAsideIsPartOfTheLeastThatIsTold) {
  const StepTrace step = Chain({1, 2, 3, 4});
  const uint64_t least_bytes = LeastMemoryBytes(step).value();
  const PlannedSchedule schedule(Within(least_bytes + kSize - 1));
  const auto cached =
      schedule.Plan(step, /*mixes=*/false, {.least_bytes = kSize, .enough_bytes = 2 * kSize})
          .value();
  EXPECT_THAT(cached->shortfall().message(),
              HasSubstr(absl::StrCat("target's least is ", least_bytes + kSize)));
}

TEST(PlannedSchedule, AStepThatRunsAsPlannedPromisesItsPeakUntilItIsAnotherOne) {
  for (const bool moves : {true, false}) {
    PlannedSchedule schedule(Within(moves ? 3 * kSize : 100 * kSize));
    TargetPlayer player(schedule);
    EXPECT_FALSE(schedule.Promise().has_value());
    schedule.Learn(schedule.Plan(Chain({1, 2, 3, 4})).value());
    EXPECT_FALSE(schedule.Promise().has_value()) << "no step runs";
    player.Save(1);
    ASSERT_TRUE(schedule.Promise().has_value());
    EXPECT_EQ(schedule.Promise()->most_bytes, schedule.followed()->plan().peak_bytes);
    EXPECT_EQ(schedule.Promise()->moves, moves);
    player.Save(7);
    EXPECT_FALSE(schedule.Promise().has_value()) << "this is another step";
  }
}

TEST(PlannedSchedule, WhatShouldHaveGoneAndHasNotLeftIsPromisedBesideThePeak) {
  PlannedSchedule schedule(Within(100 * kSize));
  const std::shared_ptr<const CachedPlan> cached = FourTensors();
  schedule.Learn(cached);
  TargetPlayer player(schedule);
  player.HoldBack();
  const auto more_bytes = [&] {
    return schedule.Promise().value().most_bytes - cached->plan().peak_bytes;
  };
  player.SaveAll({1, 2});
  EXPECT_EQ(more_bytes(), 0u);
  player.Save(3);  // from here on tensor 0 should be offloaded
  EXPECT_EQ(more_bytes(), kSize);
  player.Save(4);
  EXPECT_EQ(more_bytes(), kSize);
  player.EndForward();  // offloads it
  EXPECT_EQ(more_bytes(), 0u);
}

TEST(PlannedSchedule, WhatNeverLeavesIsPromisedBesideThePeakUntilItIsToBeBack) {
  for (const bool is_let_go : {false, true}) {
    PlannedSchedule schedule(Within(100 * kSize));
    const std::shared_ptr<const CachedPlan> cached = FourTensors();
    schedule.Learn(cached);
    TargetPlayer player(schedule);
    player.HoldBack();
    player.SaveAll({1, 2, 3, 4});
    const auto more_bytes = [&] {
      return schedule.Promise().value().most_bytes - cached->plan().peak_bytes;
    };
    EXPECT_EQ(more_bytes(), kSize);
    if (is_let_go) {
      player.Release(0);
    } else {
      schedule.OnUsed(3, AccessKind::kRead);
      schedule.OnUsed(2, AccessKind::kRead);
      schedule.TakeFetches({1, 3}, /*backward=*/5, [](const ScheduledParcel&) { return true; });
    }
    EXPECT_EQ(more_bytes(), 0u);
  }
}

// Returns the bytes that the promise adds to the peak of the followed plan.
uint64_t MoreBytes(const PlannedSchedule& schedule) {
  return schedule.Promise().value().most_bytes - schedule.followed()->plan().peak_bytes;
}

TEST(PlannedSchedule, WhatGoesWhileOthersHoldItIsPromisedBesideThePeakUntilItIsReleased) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2});
  player.Hold(0);
  EXPECT_EQ(MoreBytes(schedule), 0u);
  player.Save(3);
  EXPECT_THAT(player.Happened(), Contains("drop 0"));
  EXPECT_EQ(MoreBytes(schedule), kSize);
  player.Release(0);
  EXPECT_EQ(MoreBytes(schedule), 0u);
}

TEST(PlannedSchedule, WhatFreesNothingWhereItWasRecordedIsNotPromisedBesideThePeak) {
  PlannedSchedule schedule(Within(100 * kSize));
  StepTrace step = FourTensors()->step();
  step.objects[0].frees = false;
  schedule.Learn(Planned(step, FourTensors()->plan().moves));
  TargetPlayer player(schedule);
  player.Save(1);
  player.Hold(0);
  player.SaveAll({2, 3});
  EXPECT_THAT(player.Happened(), Contains("drop 0"));
  EXPECT_EQ(MoreBytes(schedule), 0u) << "it is among the other bytes";
}

TEST(PlannedSchedule, WhatOthersHoldIsPromisedByTheKnownStepThatFollowsAsWell) {
  PlannedSchedule schedule(Within(100 * kSize));
  const std::shared_ptr<const CachedPlan> cached = FourTensors();
  schedule.Learn(cached);
  schedule.Learn(Planned(Chain({1, 2, 3, 9}), cached->plan().moves));
  TargetPlayer player(schedule);
  player.Save(1);
  player.Hold(0);
  player.SaveAll({2, 3});
  ASSERT_NE(schedule.followed(), cached);
  EXPECT_EQ(MoreBytes(schedule), kSize);
  player.Save(4);
  ASSERT_EQ(schedule.followed(), cached);
  EXPECT_EQ(MoreBytes(schedule), kSize);
}

TEST(PlannedSchedule, WhatOthersHoldIsPromisedEachTimeThatItIsToBeAway) {
  PlannedSchedule schedule(Within(100 * kSize));
  StepTrace step = Chain({1, 2, 3, 4});
  step.accesses.insert(step.accesses.begin() + 6, 0);  // 0 1 2 3 | 3 2 0 1 0
  step.intervals.emplace_back();
  schedule.Learn(Planned(
      step, {{.object = 0, .evict_at = 2, .fetch_at = 4, .read_at = 6},
             {.object = 0, .evict_at = 7, .fetch_at = 8, .read_at = 8, .copies_out = false}}));
  TargetPlayer player(schedule);
  player.Save(1);
  player.Hold(0);
  player.SaveAll({2, 3, 4});
  player.EndForward();
  EXPECT_EQ(MoreBytes(schedule), kSize);
  for (const size_t number : {3, 2, 0}) {
    player.Read(number);
    EXPECT_EQ(MoreBytes(schedule), 0u) << "it is to be back";
  }
  player.Read(1);
  EXPECT_EQ(MoreBytes(schedule), kSize);
  player.Read(0);
  EXPECT_EQ(MoreBytes(schedule), 0u);
}

TEST(PlannedSchedule, WhatOthersHeldUntilItWasFetchedIsGoneOnceItIsDroppedAgain) {
  PlannedSchedule schedule(Within(100 * kSize));
  StepTrace step = Chain({1, 2, 3, 4});
  step.accesses.insert(step.accesses.begin() + 6, 0);
  step.intervals.emplace_back();
  schedule.Learn(Planned(
      step, {{.object = 0, .evict_at = 2, .fetch_at = 4, .read_at = 6},
             {.object = 0, .evict_at = 7, .fetch_at = 8, .read_at = 8, .copies_out = false}}));
  TargetPlayer player(schedule);
  player.Save(1);
  player.Hold(0);
  player.SaveAll({2, 3, 4});
  player.EndForward();
  player.LetGo(0);
  player.Happened();
  for (const size_t number : {3, 2, 0, 1}) player.Read(number);
  EXPECT_THAT(player.Happened(), ElementsAre("fetch 0", "drop 0"));
  EXPECT_EQ(MoreBytes(schedule), 0u);
}

// The plan counts it as there.
TEST(PlannedSchedule, WhatGoesEarlyWhileOthersHoldItIsPromisedOnceItIsToBeAway) {
  PlannedSchedule schedule(Within(4 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 4, 5}), {{.object = 0, .evict_at = 4, .fetch_at = 7, .read_at = 9}}));
  TargetPlayer player(schedule);
  player.Save(1);
  player.Hold(0);
  player.Save(2);
  player.SetOtherBytes(kSize + 1);
  player.Save(3);
  EXPECT_THAT(player.Happened(), Contains("drop 0"));
  EXPECT_EQ(MoreBytes(schedule), 0u);
  player.Save(4);
  EXPECT_EQ(MoreBytes(schedule), 0u);
  player.Save(5);
  EXPECT_EQ(MoreBytes(schedule), kSize);
}

TEST(PlannedSchedule, ThatAPlanIsNotRunIsSaidWhereItIsShown) {
  for (const uint64_t target_bytes : {kSize, 3 * kSize}) {
    SCOPED_TRACE(target_bytes);
    const PlannedSchedule schedule(Within(target_bytes));
    const PlannedStep shown = schedule.Shown(*schedule.Plan(Chain({1, 2, 3, 4})).value());
    EXPECT_EQ(shown.limit_bytes, target_bytes);
    const bool says_so =
        ExplainPlan(shown).find("not run as planned: the step does not fit") != std::string::npos;
    EXPECT_EQ(says_so, target_bytes == kSize);
  }
}

TEST(PlannedSchedule, ARecordThatIsNotValidIsNotPlanned) {
  StepTrace step = Chain({1});
  step.intervals.pop_back();
  EXPECT_THAT(PlannedSchedule(Within(kSize)).Plan(step),
              StatusIs(absl::StatusCode::kInvalidArgument));
}

// --- No target ---

TargetOptions Auto() {
  return {.windows = {.eviction_bytes = 2 * kSize, .prefetch_bytes = kSize}, .link = RoundLink()};
}

TEST(PlannedSchedule, WithoutATargetUnknownStepsRunByWindows) {
  PlannedSchedule schedule(Auto());
  EXPECT_FALSE(schedule.AsksForDeviceBytes());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  EXPECT_THAT(player.Happened(),
              ElementsAre("out 0", "out 1", "out 2", "drop 0", "out 3", "drop 1"));
  player.Read(3);
  EXPECT_THAT(player.Happened(), ElementsAre("fetch 1"));
}

TEST(PlannedSchedule, WithoutATargetWhatWasDroppedToMakeRoomIsFetchedAheadOnceMore) {
  PlannedSchedule schedule(Auto());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  player.Read(3);
  ASSERT_THAT(player.Happened(), Contains("fetch 1"));
  player.WantRoom();
  player.Read(2);
  EXPECT_THAT(player.Happened(), Contains("fetch 1"));
}

TEST(PlannedSchedule, WithoutATargetAKnownStepRunsByItsPlan) {
  PlannedSchedule schedule(Auto());
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.SetOtherBytes(1000 * kSize);
  player.Play({1, 2, 3, 4});
  EXPECT_THAT(player.Happened(),
              ElementsAre("stay 1", "out 0", "stay 2", "drop 0", "stay 3", "fetch 0"));
}

TEST(PlannedSchedule, InAKnownStepNothingWaitsForCompany) {
  TargetOptions options = Auto();
  options.windows.full_batch_bytes = kSize;
  PlannedSchedule schedule(options);
  schedule.Learn(FourTensors());
  EXPECT_GT(schedule.BatchBytes(), 0u);
  EXPECT_GT(schedule.LateBytes(), 0u);
  TargetPlayer player(schedule);
  player.Save(1);
  EXPECT_EQ(schedule.BatchBytes(), 0u);
  EXPECT_EQ(schedule.LateBytes(), 0u);
}

TEST(PlannedSchedule, WithoutATargetThePlanIsNoSlowerThanItsCompute) {
  StepTrace step = Chain({1, 2, 3, 4});
  for (StepInterval& interval : step.intervals) interval.compute_us = 1;
  const PlannedSchedule schedule(Auto());
  const std::shared_ptr<const CachedPlan> cached = schedule.Plan(step).value();
  EXPECT_LE(cached->plan().step_us, TargetOptions::kSlowdown * step.compute_us());
  EXPECT_LT(cached->plan().peak_bytes, 4 * kSize);
}

}  // namespace planned_schedule_test
}  // namespace pinion::testing
