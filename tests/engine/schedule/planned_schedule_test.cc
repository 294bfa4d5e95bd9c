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
namespace target_schedule_test {

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
StepRecord Chain(const std::vector<uint64_t>& signatures) {
  return ForwardAndBackward(kSize, signatures);
}

// A plan of the test's own.
std::shared_ptr<const KnownStep> Planned(StepRecord step, std::vector<StepMove> moves) {
  StepPlan plan;
  plan.moves = std::move(moves);
  return std::make_shared<const KnownStep>(std::move(step), std::move(plan));
}

// Four tensors, uses 0 to 3 and in reverse 4 to 7. Tensor 0 goes when the third one has been saved,
// and is fetched when the third one is read.
std::shared_ptr<const KnownStep> FourTensors() {
  return Planned(Chain({1, 2, 3, 4}), {{.object = 0, .drop_at = 2, .fetch_at = 5, .read_at = 7}});
}

// Four tensors. The operator behind the second one takes as much as three for a moment.
std::shared_ptr<const KnownStep> MuchBehindTheSecond() {
  StepRecord step = Chain({1, 2, 3, 4});
  step.stretches[2].transient_bytes = 3 * kSize;
  return Planned(std::move(step), {{.object = 0, .drop_at = 4, .fetch_at = 5, .read_at = 7}});
}

std::vector<uint64_t> FirstSignatures(const TargetSchedule& schedule) {
  std::vector<uint64_t> signatures;
  for (const auto& known : schedule.known()) {
    signatures.push_back(known->step().objects[0].signature);
  }
  return signatures;
}

// --- Without knowledge ---

TEST(TargetSchedule, WhileNoStepIsKnownAllLeaveAndAreDroppedAtOnce) {
  TargetSchedule schedule(Within(100 * kSize));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3});
  EXPECT_THAT(player.Happened(), ElementsAre("out 0", "drop 0", "out 1", "drop 1"));
  player.EndForward();
  EXPECT_THAT(player.Happened(), ElementsAre("out 2", "drop 2"));
}

TEST(TargetSchedule, WhileNoStepIsKnownNothingIsFetchedAhead) {
  TargetSchedule schedule(Within(100 * kSize));
  TargetPlayer player(schedule);
  player.Play({1, 2, 3});
  EXPECT_THAT(player.Happened(), ElementsAre("out 0", "drop 0", "out 1", "drop 1", "out 2",
                                             "drop 2", "demand 2", "demand 1", "demand 0"));
}

// What several readers have saved is unpacked once for each of them, and each fetch brings another
// copy: the one before has its own.
TEST(TargetSchedule, WhileNoStepIsKnownWhatIsReadSeveralTimesInARowGoesBehindTheLast) {
  TargetSchedule schedule(Within(100 * kSize));
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

TEST(TargetSchedule, WithATargetNothingWaitsForCompany) {
  TargetOptions options = Within(100 * kSize);
  options.windows = {.eviction_bytes = 100 * kSize, .full_batch_bytes = kSize};
  const TargetSchedule schedule(options);
  EXPECT_EQ(schedule.BatchBytes(), 0u);
  EXPECT_EQ(schedule.LateBytes(), 0u);
}

// A parcel that comes back brings all that is in it, which nobody has planned for.
TEST(TargetSchedule, WithATargetNothingSmallSharesAParcelUntilTheStepIsKnown) {
  TargetOptions options = Within(100 * kSize);
  options.link = AssumedLink();  // of which 20,000 bytes are small
  TargetSchedule schedule(options);
  const auto company = [&schedule](uint64_t size_bytes) {
    return schedule.CompanyOf(schedule.OnSaved(/*scope=*/1, {size_bytes, /*signature=*/9}).object);
  };
  const uint64_t first = company(kSize);
  EXPECT_NE(first, 0u);
  EXPECT_NE(company(kSize), first);
  EXPECT_EQ(company(1 << 20), 0u) << "what is large has a parcel of its own anyhow";
  options.memory_bytes.reset();
  TargetSchedule by_windows(options);
  EXPECT_EQ(by_windows.CompanyOf(by_windows.OnSaved(1, {kSize, 9}).object), 0u);
}

TEST(TargetSchedule, WhatHasStayedAndLeavesLateSharesNoParcelEither) {
  TargetOptions options = Within(100 * kSize);
  options.link = AssumedLink();
  TargetSchedule schedule(options);
  schedule.Learn(Planned(Chain({1, 2, 3}), {}));
  const uint32_t first = schedule.OnSaved(/*scope=*/1, {kSize, 1}).object;
  const uint32_t second = schedule.OnSaved(/*scope=*/1, {kSize, 2}).object;
  schedule.OnSaved(/*scope=*/1, {kSize, /*signature=*/77});
  ASSERT_THAT(schedule.TakeLateLeavers(), ElementsAre(first, second));
  EXPECT_NE(schedule.CompanyOf(first), 0u);
  EXPECT_NE(schedule.CompanyOf(first), schedule.CompanyOf(second));
}

TEST(TargetSchedule, WhatIsSmallSharesAParcelWithWhatThePlanMovesAtTheSameTimes) {
  TargetOptions options = Within(100 * kSize);
  options.link = AssumedLink();
  TargetSchedule schedule(options);
  StepRecord step = Chain({1, 2, 3});
  step.operators = {0, 1, 2, 3, 4, 4};  // one reads both that the plan moves
  schedule.Learn(Planned(step, {{.object = 0, .drop_at = 2, .fetch_at = 3, .read_at = 5},
                                {.object = 1, .drop_at = 2, .fetch_at = 3, .read_at = 4}}));
  for (const uint64_t signature : {1, 2, 3}) schedule.OnSaved(/*scope=*/1, {kSize, signature});
  EXPECT_EQ(schedule.CompanyOf(0), schedule.CompanyOf(1));
  EXPECT_EQ(schedule.CompanyOf(2), KnownStep::AloneCompany(2)) << "it leaves for the target alone";
}

TEST(TargetSchedule, AStepLastsAsLongAsAnyTensorIsNeeded) {
  TargetSchedule schedule(Within(100 * kSize));
  TargetPlayer player(schedule);
  EXPECT_FALSE(schedule.IsInStep());
  player.SaveAll({1, 2});
  player.Release(1);
  EXPECT_TRUE(schedule.IsInStep());
  player.Release(0);
  EXPECT_FALSE(schedule.IsInStep());
}

// --- What is worth recording ---

TEST(TargetSchedule, TheFirstStepIsWorthRecording) {
  TargetSchedule schedule(Within(3 * kSize));
  EXPECT_TRUE(schedule.WantsRecord());
  TargetPlayer(schedule).Play({1, 2, 3, 4});
  EXPECT_TRUE(schedule.WantsRecord());
}

TEST(TargetSchedule, AfterThreeKnownStepsInARowNothingIsWorthRecording) {
  TargetSchedule schedule(Within(3 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  for (int step = 0; step < TargetSchedule::kKnownInARow; ++step) {
    EXPECT_TRUE(schedule.WantsRecord()) << step;
    player.Play({1, 2, 3, 4});
  }
  EXPECT_FALSE(schedule.WantsRecord());
}

TEST(TargetSchedule, AStepThatTurnsOutToBeUnknownMakesTheNextThreeWorthRecording) {
  TargetSchedule schedule(Within(3 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  for (int step = 0; step < TargetSchedule::kKnownInARow; ++step) player.Play({1, 2, 3, 4});
  ASSERT_FALSE(schedule.WantsRecord());
  player.SaveAll({1, 2});
  player.Save(9);
  player.EndStep();
  for (int step = 0; step < TargetSchedule::kKnownInARow; ++step) {
    EXPECT_TRUE(schedule.WantsRecord()) << step;
    player.Play({1, 2, 3, 4});
  }
  EXPECT_FALSE(schedule.WantsRecord());
}

TEST(TargetSchedule, AStepThatIsNoLongerWhatIsKnownOfItIsWorthRecordingTwice) {
  TargetSchedule schedule(Within(3 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  for (int step = 0; step < TargetSchedule::kKnownInARow; ++step) player.Play({1, 2, 3, 4});
  ASSERT_FALSE(schedule.WantsRecord());
  schedule.RecordAgain();
  for (int step = 0; step < 2; ++step) {
    EXPECT_TRUE(schedule.WantsRecord()) << step;
    player.Play({1, 2, 3, 4});
  }
  EXPECT_FALSE(schedule.WantsRecord());
}

TEST(TargetSchedule, StepsThatAddToGradientsAreRecordedAsOftenAsThoseThatMakeThem) {
  TargetSchedule schedule(Within(3 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  for (int step = 0; step < TargetSchedule::kKnownInARow; ++step) player.Play({1, 2, 3, 4});
  EXPECT_FALSE(schedule.WantsRecord());
  schedule.set_begins_with_gradients(true);
  for (int step = 0; step < TargetSchedule::kKnownInARow; ++step) {
    EXPECT_TRUE(schedule.WantsRecord()) << step;
    player.Play({1, 2, 3, 4});
  }
  EXPECT_FALSE(schedule.WantsRecord());
  schedule.RecordAgain();
  EXPECT_TRUE(schedule.WantsRecord());
  schedule.set_begins_with_gradients(false);
  EXPECT_FALSE(schedule.WantsRecord()) << "nothing is wrong with those";
}

TEST(TargetSchedule, AStepThatIsRaisedMayHaveAMixUnlessItWasTried) {
  StepRecord step = Chain({1, 2});
  step.segments.resize(1);
  for (const bool was_tried : {false, true}) {
    TargetSchedule schedule(Within(100 * kSize));
    auto known = Planned(step, {});
    if (was_tried) known = known->WithMixTried();
    schedule.Learn(known);
    schedule.LearnRaised(Planned(step.WithMore(kSize), {}), *known);
    ASSERT_EQ(schedule.known().size(), 1u);
    EXPECT_EQ(schedule.known().front()->step().stretches[0].other_bytes, kSize);
    EXPECT_EQ(schedule.known().front()->WantsMix(), !was_tried);
  }
}

TEST(TargetSchedule, WhatIsForgottenRunsLikeTheFirstStepAndIsWorthRecording) {
  TargetSchedule schedule(Within(3 * kSize));
  TargetPlayer player(schedule);
  const std::vector<std::vector<uint64_t>> shapes = {{1, 2, 3, 4}, {11, 12, 13, 14}, {21, 22, 23}};
  for (const auto& shape : shapes) schedule.Learn(schedule.Plan(Chain(shape)).value());
  for (int turn = 0; turn < 2; ++turn) {
    for (const auto& shape : shapes) player.Play(shape);
  }
  ASSERT_FALSE(schedule.WantsRecord());
  schedule.ForgetKnown();
  EXPECT_THAT(schedule.known(), IsEmpty());
  for (const auto& shape : shapes) {
    player.Play(shape);
    EXPECT_EQ(schedule.followed(), nullptr);
    EXPECT_TRUE(schedule.WantsRecord());
  }
}

TEST(TargetSchedule, AStepThatRunsWhenAllIsForgottenGoesOnAsPlanned) {
  TargetSchedule schedule(Within(100 * kSize));
  const std::shared_ptr<const KnownStep> known = FourTensors();
  schedule.Learn(known);
  TargetPlayer player(schedule);
  player.SaveAll({1, 2});
  schedule.ForgetKnown();
  player.SaveAll({3, 4});
  player.EndForward();
  EXPECT_THAT(player.Happened(), ElementsAre("stay 1", "out 0", "stay 2", "drop 0", "stay 3"));
  EXPECT_EQ(schedule.followed(), known);
  player.EndStep();
  player.Save(1);
  EXPECT_EQ(schedule.followed(), nullptr);
}

// How many of that many steps, which are all different, are recorded.
int RecordsOf(TargetSchedule& schedule, uint64_t steps) {
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

TEST(TargetSchedule, WhereStepsAreNeverAlikeTheyAreRecordedLessAndLessOften) {
  TargetSchedule schedule(Within(3 * kSize));
  const int of_the_first = RecordsOf(schedule, 1000);
  EXPECT_LT(of_the_first, 250);
  TargetSchedule other(Within(3 * kSize));
  EXPECT_LT(RecordsOf(other, 8000), of_the_first + 3 * TargetSchedule::kMaxKnown + 3);
}

TEST(TargetSchedule, WhereStepsBeginToBeAlikeTheyAreRecordedAgainSoon) {
  TargetSchedule schedule(Within(3 * kSize));
  RecordsOf(schedule, 1000);
  TargetPlayer player(schedule);
  int steps = 0;
  for (; !schedule.WantsRecord(); ++steps) player.Play({1, 2, 3, 4});
  EXPECT_LE(steps, 1000 / 32);
}

TEST(TargetSchedule, AKnownStepAmongOthersMakesAllOfThemWorthRecording) {
  TargetSchedule schedule(Within(3 * kSize));
  RecordsOf(schedule, 1000);
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.Play({1, 2, 3, 4});
  EXPECT_TRUE(schedule.WantsRecord());
  player.Play({7, 8});
  EXPECT_TRUE(schedule.WantsRecord());
}

TEST(TargetSchedule, WhatWasFollowedIsToldUntilTheNextStepBegins) {
  TargetSchedule schedule(Within(3 * kSize));
  TargetPlayer player(schedule);
  player.Play({1, 2, 3, 4});
  EXPECT_EQ(schedule.followed(), nullptr);
  const std::shared_ptr<const KnownStep> known = FourTensors();
  schedule.Learn(known);
  player.Play({1, 2, 3, 4});
  EXPECT_EQ(schedule.followed(), known);
  player.Play({9});
  EXPECT_EQ(schedule.followed(), nullptr);
}

// --- A known step ---

TEST(TargetSchedule, WhatThePlanDoesNotMoveStays) {
  TargetSchedule schedule(Within(3 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  EXPECT_THAT(player.Happened(), ElementsAre("stay 1", "out 0", "stay 2", "drop 0", "stay 3"));
}

TEST(TargetSchedule, AKnownStepIsDroppedAtThePlannedUsesAndNotBefore) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 4}), {{.object = 1, .drop_at = 3, .fetch_at = 6, .read_at = 6},
                                    {.object = 0, .drop_at = 4, .fetch_at = 7, .read_at = 7}}));
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

TEST(TargetSchedule, AKnownStepIsFetchedFromThePlannedUsesOnAndNotBefore) {
  TargetSchedule schedule(Within(3 * kSize));
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
std::shared_ptr<const KnownStep> FourTensorsOfWhichOneWaits() {
  return Planned(Chain({1, 2, 3, 4}),
                 {{.object = 1, .drop_at = 2, .fetch_at = 5, .read_at = 6},
                  {.object = 0, .drop_at = 3, .fetch_at = 6, .read_at = 7, .copy_at = 2}});
}

TEST(TargetSchedule, WhatIsCopiedBehindOthersStaysUntilTheyHaveLeft) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensorsOfWhichOneWaits());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 0"));
  player.Save(3);
  EXPECT_THAT(player.Happened(), ElementsAre("stay 2", "out 1", "out 0", "drop 1"));
  player.Save(4);
  EXPECT_THAT(player.Happened(), ElementsAre("stay 3", "drop 0"));
}

TEST(TargetSchedule, OfThoseThatWaitForOneUseTheFirstToBeDroppedLeavesFirst) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(Planned(Chain({1, 2, 3, 4}),
                         {{.object = 1, .drop_at = 3, .fetch_at = 6, .read_at = 6, .copy_at = 3},
                          {.object = 0, .drop_at = 4, .fetch_at = 7, .read_at = 7, .copy_at = 3},
                          {.object = 2, .drop_at = 3, .fetch_at = 5, .read_at = 5}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3});
  player.Happened();
  player.Save(4);
  EXPECT_THAT(player.Happened(),
              ElementsAre("stay 3", "out 2", "out 1", "out 0", "drop 1", "drop 2"));
}

TEST(TargetSchedule, WhatComesWhenItsCopyIsDueDoesNotWait) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensorsOfWhichOneWaits());
  TargetPlayer player(schedule);
  player.SaveAll({2, 3, 1});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 1", "out 0", "drop 0"));
  player.Save(4);
  EXPECT_THAT(player.Happened(), ElementsAre("stay 3", "out 2", "drop 2"));
}

TEST(TargetSchedule, WhatWaitsInAStepThatIsAnotherOneLeavesWithTheRest) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensorsOfWhichOneWaits());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 0"));
  player.Save(77);
  EXPECT_THAT(player.Happened(), ElementsAre("out 1", "out 0", "drop 1", "drop 0"));
}

// What leaves together has left when all of it has.
TEST(TargetSchedule, OfWhatIsLargeOnlyWhatIsDroppedTogetherLeavesTogether) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 4}), {{.object = 2, .drop_at = 3, .fetch_at = 4, .read_at = 5},
                                    {.object = 1, .drop_at = 4, .fetch_at = 5, .read_at = 6},
                                    {.object = 0, .drop_at = 3, .fetch_at = 6, .read_at = 7}}));
  std::vector<uint64_t> companies;
  for (const uint64_t signature : {1, 2, 3}) {
    companies.push_back(
        schedule.CompanyOf(schedule.OnSaved(/*scope=*/1, {kSize, signature}).object));
  }
  EXPECT_EQ(companies[0], companies[2]);
  EXPECT_NE(companies[0], companies[1]);
}

// The plan is a preference, the target a rule.
TEST(TargetSchedule, WhereTheDeviceHasMoreThanItMayWhatWaitsAndWhatThePlanKeepsLeaves) {
  TargetSchedule schedule(Within(5 * kSize));
  schedule.Learn(Planned(Chain({1, 2, 3, 4}),
                         {{.object = 0, .drop_at = 5, .fetch_at = 6, .read_at = 7, .copy_at = 5}}));
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

TEST(TargetSchedule, ItIsKnownThatBytesAreLackingUntilEnoughHasGone) {
  TargetSchedule schedule(Within(4 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.Save(1);
  schedule.OnDeviceBytes(3 * kSize, /*visiting_bytes=*/0);
  EXPECT_FALSE(schedule.LacksBytes()) << "the next one is made";
  schedule.OnDeviceBytes(3 * kSize + 1, /*visiting_bytes=*/0);
  EXPECT_TRUE(schedule.LacksBytes());
}

// It has come to them in another order before it was known to be that step.
TEST(TargetSchedule, AStepThatGoesOnAsAnotherOneKnowsWhetherItHasLeftOutUsesOfThat) {
  for (const bool in_order : {true, false}) {
    TargetSchedule schedule(Within(6 * kSize));
    StepRecord much_at_first = Chain({1, 2, 3, 4});
    much_at_first.stretches[1].transient_bytes = 3 * kSize;
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

TEST(TargetSchedule, AStepThatIsNotKnownLacksNothingThatCouldLeave) {
  TargetSchedule schedule(Within(4 * kSize));
  TargetPlayer player(schedule);
  player.Save(1);
  schedule.OnDeviceBytes(100 * kSize, /*visiting_bytes=*/0);
  EXPECT_FALSE(schedule.LacksBytes());
}

// First what is read last, and no more than is missing.
TEST(TargetSchedule, OfWhatThePlanKeepsAsMuchLeavesAsTheDeviceLacks) {
  TargetSchedule schedule(Within(5 * kSize));
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

// It would come back at once, as a copy that nobody has counted.
TEST(TargetSchedule, WhatIsReadNowIsNotDroppedForItsOwnReader) {
  TargetSchedule schedule(Within(5 * kSize));
  StepRecord step = Chain({1, 2, 3, 4});
  step.uses.push_back(3);  // 0 1 2 3 | 3 2 1 0 3
  step.stretches.emplace_back();
  schedule.Learn(Planned(step, {{.object = 0, .drop_at = 5, .fetch_at = 6, .read_at = 7},
                                {.object = 3, .drop_at = 5, .fetch_at = 7, .read_at = 8}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  player.Happened();
  player.SetOtherBytes(3 * kSize);
  player.Read(3);
  EXPECT_THAT(player.Happened(), ElementsAre("out 1", "drop 0", "drop 1"));
}

// Weights in use may take more than was set aside for them.
TEST(TargetSchedule, WhatHasLeftGivesWayToWhatVisits) {
  TargetSchedule schedule(Within(5 * kSize));
  StepPlan plan;
  plan.moves = {{.object = 0, .drop_at = 5, .fetch_at = 6, .read_at = 7}};
  plan.peak_bytes = 4 * kSize;
  schedule.Learn(std::make_shared<const KnownStep>(Chain({1, 2, 3, 4}), std::move(plan)));
  TargetPlayer player(schedule);
  player.SetVisitingBytes(2 * kSize);
  player.SaveAll({1, 2});
  EXPECT_TRUE(player.IsHere(0));
  player.Save(3);
  EXPECT_FALSE(player.IsHere(0));
  EXPECT_TRUE(player.IsHere(1)) << "which the plan keeps";
}

// Dropping it would free nothing by now.
TEST(TargetSchedule, WhatTheProgramHoldsDoesNotLeaveForTheTarget) {
  TargetSchedule schedule(Within(4 * kSize));
  StepRecord step = Chain({1, 2, 3, 4});
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

TEST(TargetSchedule, WhereAllIsToGoWhatWaitsLeaves) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(Planned(Chain({1, 2, 3, 4}),
                         {{.object = 0, .drop_at = 5, .fetch_at = 6, .read_at = 7, .copy_at = 5}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2});
  EXPECT_THAT(schedule.TakeAllEvictions(), IsEmpty());
  player.Happened();
  player.Save(3);
  EXPECT_THAT(player.Happened(), ElementsAre("stay 2", "out 0"));
}

TEST(TargetSchedule, WhatGoesWhileItWaitsIsNotAskedForAgain) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensorsOfWhichOneWaits());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2});
  player.Release(0);
  player.Happened();
  player.Save(3);
  EXPECT_THAT(player.Happened(), ElementsAre("stay 2", "out 1", "drop 1"));
}

TEST(TargetSchedule, FetchesComeInTheOrderOfThePlan) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 4}), {{.object = 2, .drop_at = 3, .fetch_at = 4, .read_at = 5},
                                    {.object = 0, .drop_at = 2, .fetch_at = 4, .read_at = 7},
                                    {.object = 1, .drop_at = 3, .fetch_at = 5, .read_at = 6}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  player.Happened();
  player.Read(3);
  EXPECT_THAT(player.Happened(), ElementsAre("fetch 2", "fetch 0"));
  player.Read(2);
  EXPECT_THAT(player.Happened(), ElementsAre("fetch 1"));
}

TEST(TargetSchedule, WhatLeavesWhenItsDropIsDueGoesAtOnce) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.HoldBack();
  player.SaveAll({1, 2, 3, 4});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 1", "stay 2", "stay 3"));
  player.EndForward();
  EXPECT_THAT(player.Happened(), ElementsAre("out 0", "drop 0"));
}

TEST(TargetSchedule, WhatIsDroppedTwiceIsFetchedTwice) {
  TargetSchedule schedule(Within(100 * kSize));
  StepRecord step = Chain({1, 2, 3, 4});
  step.uses.insert(step.uses.begin() + 6, 0);  // 0 1 2 3 | 3 2 0 1 0
  step.stretches.emplace_back();
  schedule.Learn(Planned(
      step, {{.object = 0, .drop_at = 2, .fetch_at = 4, .read_at = 6},
             {.object = 0, .drop_at = 7, .fetch_at = 8, .read_at = 8, .copies_out = false}}));
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

TEST(TargetSchedule, WhatItsLastReaderHasFetchedIsNotFetchedOnceMoreForNobody) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3}), {{.object = 0, .drop_at = 2, .fetch_at = 5, .read_at = 5}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3});
  player.EndForward();
  player.Read(2);
  player.Read(1);
  player.Happened();
  player.ReadLast(0);
  EXPECT_THAT(player.Happened(), ElementsAre("demand 0"));
}

TEST(TargetSchedule, WhatHasGoneToMakeRoomIsNotDroppedOnceMore) {
  TargetSchedule schedule(Within(100 * kSize));
  StepRecord step = Chain({1, 2, 3, 4});
  step.uses = {0, 0, 1, 2, 3, 3, 2, 0, 1, 0};  // a branch saves tensor 0 again, and reads it first
  step.stretches.resize(step.uses.size() + 1);
  step.objects[0].saved_until = 1;
  schedule.Learn(Planned(
      step, {{.object = 0, .drop_at = 3, .fetch_at = 5, .read_at = 7},
             {.object = 0, .drop_at = 8, .fetch_at = 9, .read_at = 9, .copies_out = false}}));
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
class TargetScheduleOfAGroup : public ::testing::Test {
 protected:
  TargetScheduleOfAGroup() : schedule_(Within(100 * kSize)) {
    StepRecord step = Chain({1, 2, 3});
    step.uses.insert(step.uses.begin() + 4, 0);  // 0 1 2 | 2 0 1 0
    step.stretches.emplace_back();
    schedule_.Learn(Planned(
        step, {{.object = 0, .drop_at = 2, .fetch_at = 3, .read_at = 4},
               {.object = 1, .drop_at = 3, .fetch_at = 4, .read_at = 5},
               {.object = 0, .drop_at = 5, .fetch_at = 6, .read_at = 6, .copies_out = false}}));
    for (const uint64_t signature : {1, 2}) schedule_.OnSaved(kScope, {kSize, signature});
    parcel_.place = {kScope, 2};
    parcel_.size_bytes = 2 * kSize;
    parcel_.objects = {0, 1};
  }
  void Leave() {
    const HeldBytes held = {&parcel_, 2 * kSize};
    schedule_.OnLeft(parcel_, {&held, 1});
  }
  ~TargetScheduleOfAGroup() override { schedule_.OnGone(parcel_); }

  static constexpr ScopeId kScope = 1;
  TargetSchedule schedule_;
  ScheduledParcel parcel_;
};

TEST_F(TargetScheduleOfAGroup, TheParcelGoesWithTheFirstThatIsDue) {
  Leave();
  EXPECT_THAT(schedule_.TakeEvictions(), IsEmpty());
  schedule_.OnSaved(kScope, {kSize, 3});
  EXPECT_THAT(schedule_.TakeEvictions(), ElementsAre(&parcel_));
}

TEST_F(TargetScheduleOfAGroup, TheParcelThatLeavesLateGoesAtOnceIfAnyOfThemIsDue) {
  schedule_.OnSaved(kScope, {kSize, 3});
  EXPECT_THAT(schedule_.TakeEvictions(), IsEmpty());
  Leave();
  EXPECT_THAT(schedule_.TakeEvictions(), ElementsAre(&parcel_));
}

TEST_F(TargetScheduleOfAGroup, OnceItHasComeBackItStaysForTheOthers) {
  Leave();
  schedule_.OnSaved(kScope, {kSize, 3});
  schedule_.TakeEvictions();
  schedule_.OnUsed(2, Use::kRead);
  schedule_.OnFetched(parcel_, /*backward=*/5);
  schedule_.OnUsed(0, Use::kRead);
  schedule_.OnUsed(1, Use::kRead);
  EXPECT_THAT(schedule_.TakeEvictions(), IsEmpty());
}

// Dropping it once more would need all that is in it.
TEST_F(TargetScheduleOfAGroup, InAGraphThatIsKeptItDoesNotStayForTheNextBackward) {
  Leave();
  schedule_.OnSaved(kScope, {kSize, 3});
  schedule_.TakeEvictions();
  schedule_.OnUsed(2, Use::kReadAndKept);
  schedule_.OnFetched(parcel_, /*backward=*/5);
  schedule_.OnUsed(0, Use::kReadAndKept);
  EXPECT_FALSE(schedule_.StaysFetched(parcel_));
}

// Two parcels that were fetched ahead. The last reader and the first one share one of them.
TEST(TargetSchedule, AParcelThatWasFetchedAheadStaysAsLongAsItsFirstReaderNeeds) {
  TargetSchedule schedule(Within(8 * kSize));
  StepRecord step = Chain({1, 2, 3, 4, 5});
  step.uses = {0, 1, 2, 3, 4, 4, 3, 1, 2, 0};
  schedule.Learn(
      Planned(std::move(step), {{.object = 0, .drop_at = 3, .fetch_at = 5, .read_at = 9},
                                {.object = 1, .drop_at = 3, .fetch_at = 5, .read_at = 7},
                                {.object = 2, .drop_at = 3, .fetch_at = 5, .read_at = 8}}));
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
  schedule.OnUsed(4, Use::kRead);
  const auto is_away = [](const ScheduledParcel&) { return true; };
  for (int i = 0; i < 2; ++i) {
    for (ScheduledParcel* parcel : schedule.TakeFetches({}, kBackward, is_away).parcels) {
      schedule.OnFetched(*parcel, kBackward);
    }
  }
  ASSERT_THAT(schedule.FetchedAhead(), SizeIs(2));
  schedule.OnUsed(3, Use::kRead);
  schedule.OnDeviceBytes(8 * kSize + 1, 0);
  EXPECT_THAT(schedule.TakeEvictions(), ElementsAre(&middle));
  schedule.OnGone(outer);
  schedule.OnGone(middle);
}

TEST(TargetSchedule, WhatABranchLeavesOutDoesNotDisturbTheRest) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 4}), {{.object = 1, .drop_at = 3, .fetch_at = 5, .read_at = 6},
                                    {.object = 0, .drop_at = 3, .fetch_at = 5, .read_at = 7}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 3, 4});
  player.EndForward();
  EXPECT_THAT(player.Happened(), ElementsAre("stay 1", "out 0", "stay 2", "drop 0"));
  player.Read(2);
  player.Read(1);
  EXPECT_THAT(player.Happened(), ElementsAre("fetch 0"));
  player.Read(0);
}

TEST(TargetSchedule, WhatIsToBeBackAlreadyIsNotDroppedAnyMore) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 4, 5}), {{.object = 0, .drop_at = 2, .fetch_at = 3, .read_at = 9}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 5});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 1", "out 0", "stay 2"));
}

TEST(TargetSchedule, AKnownStepRunsAnewEachTime) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.Play({1, 2, 3, 4});
  const std::vector<std::string> first = player.Happened();
  EXPECT_THAT(first, ElementsAre("stay 1", "out 0", "stay 2", "drop 0", "stay 3", "fetch 0"));
  player.Play({1, 2, 3, 4});
  EXPECT_EQ(player.Happened(), first);
}

TEST(TargetSchedule, WhatABranchSavesAndReadsOnceMoreDoesNotDisturbTheRest) {
  TargetSchedule schedule(Within(100 * kSize));
  StepRecord step = Chain({1, 2, 3});
  step.uses = {0, 1, 1, 2, 2, 1, 1, 0};  // the second of two operators that save and read tensor 1
  step.stretches.resize(step.uses.size() + 1);
  step.objects[1].saved_until = 2;
  schedule.Learn(Planned(step, {{.object = 0, .drop_at = 3, .fetch_at = 5, .read_at = 7}}));
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

TEST(TargetSchedule, WhatNobodyNeedsAnyMoreIsNotFetched) {
  TargetSchedule schedule(Within(100 * kSize));
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

// --- What the device really has ---

TEST(TargetSchedule, WhereMoreIsAllocatedThanWasPlannedTheOldestThatHasLeftGoesEarly) {
  TargetSchedule schedule(Within(4 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 4, 5}), {{.object = 1, .drop_at = 4, .fetch_at = 6, .read_at = 8},
                                       {.object = 0, .drop_at = 4, .fetch_at = 7, .read_at = 9}}));
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

TEST(TargetSchedule, WhatIsToComeUntilTheNextUseCountsAsAllocated) {
  TargetSchedule schedule(Within(4 * kSize));
  StepRecord step = Chain({1, 2, 3});
  step.stretches[2].transient_bytes = kSize;
  schedule.Learn(Planned(step, {{.object = 0, .drop_at = 3, .fetch_at = 5, .read_at = 5}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2});
  player.EndStep();
  EXPECT_THAT(player.Happened(), ElementsAre("stay 1", "out 0"));
  player.SetOtherBytes(1);
  player.SaveAll({1, 2});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 1", "out 0", "drop 0"))
      << "two are there, the third is made, and its operator takes as much again";
}

TEST(TargetSchedule, AStepThatLeavesUsesOutCountsWhatAnyOfThemTakes) {
  TargetSchedule schedule(Within(4 * kSize));
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

TEST(TargetSchedule, WhatWasLeftOutOfTheStepThatItGoesOnAsCountsToo) {
  TargetSchedule schedule(Within(4 * kSize));
  schedule.Learn(MuchBehindTheSecond());
  schedule.Learn(Planned(Chain({1, 3}), {}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 3});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 0", "stay 1"));
  player.Save(4);
  EXPECT_THAT(player.Happened(), ElementsAre("stay 2", "out 0", "out 1", "drop 0", "drop 1"))
      << "it leaves 2 out, behind which it is four";
}

TEST(TargetSchedule, WhereMoreIsAllocatedThanWasPlannedFetchesWait) {
  TargetSchedule schedule(Within(3 * kSize));
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

TEST(TargetSchedule, FetchesLeaveRoomForWhatIsToComeUntilTheNextUse) {
  TargetSchedule schedule(Within(4 * kSize));
  StepRecord step = Chain({1, 2, 3, 4});
  step.stretches[6].transient_bytes = 2 * kSize;
  schedule.Learn(Planned(step, {{.object = 0, .drop_at = 2, .fetch_at = 5, .read_at = 7}}));
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

TEST(TargetSchedule, AFetchThatWasRefusedIsAskedForAgain) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 4, 5}), {{.object = 0, .drop_at = 2, .fetch_at = 6, .read_at = 9}}));
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

TEST(TargetSchedule, ANewBackwardTriesAtOnceWhatWasRefusedInTheOneBefore) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 4, 5}), {{.object = 0, .drop_at = 2, .fetch_at = 6, .read_at = 9}}));
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

TEST(TargetSchedule, WithoutATargetInBytesWhatTheProgramHoldsLeavesOnlyByAPlan) {
  TargetSchedule schedule(TargetOptions{.link = RoundLink()});
  EXPECT_FALSE(schedule.OnSaved(/*scope=*/1, {kSize, /*signature=*/77}).even_if_held);
  schedule.OnReleased(0);
  schedule.Learn(FourTensors());
  EXPECT_TRUE(schedule.OnSaved(/*scope=*/1, {kSize, /*signature=*/1}).even_if_held);
}

TEST(TargetSchedule, AFetchThatWasDroppedToMakeRoomIsAskedForAgain) {
  TargetSchedule schedule(Within(3 * kSize));
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

// --- Segments that can be computed again ---

// Of the tensors with these signatures. Of two segments the second one is computed again.
std::shared_ptr<const KnownStep> Mixed(const std::vector<uint64_t>& signatures) {
  StepRecord step = Chain(signatures);
  step.segments.resize(2);
  step.segments[1].computed_again = true;
  return Planned(step, {});
}

TEST(TargetSchedule, SegmentsAreComputedAgainAsTheKnownStepSays) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(Mixed({1, 2}));
  TargetPlayer player(schedule);
  player.Save(1);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), std::nullopt);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 2u);
}

// The same, where the first segment begins before anything is saved; `again` are computed again.
std::shared_ptr<const KnownStep> EarlyMixed(const std::vector<uint64_t>& signatures,
                                            const std::vector<bool>& again,
                                            std::vector<uint32_t> mix = {}) {
  StepRecord step = Chain(signatures);
  step.early_segments = 1;
  step.segments.resize(again.size());
  for (size_t i = 0; i < again.size(); ++i) step.segments[i].computed_again = again[i];
  return std::make_shared<const KnownStep>(step, StepPlan(), absl::OkStatus(), std::move(mix));
}

TEST(TargetSchedule, ASegmentThatAStepBeginsWithIsComputedAgainAsTheLikelyStepSays) {
  TargetSchedule schedule(Within(100 * kSize));
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
    const SegmentChoice::Ran ran = schedule.TakeRan();
    EXPECT_THAT(ran.computed_again, ElementsAre(true, false));
    EXPECT_EQ(ran.early, 1u);
  }
}

TEST(TargetSchedule, ASegmentThatAStepBeginsWithIsThatOfAStepThatAddsToGradientsAsWell) {
  TargetSchedule schedule(Within(100 * kSize));
  StepRecord adds = EarlyMixed({5, 6}, {true, false})->step();
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

TEST(TargetSchedule, WhereAnotherStepThanTheLikelyOneBeginsWithASegmentSuchOnesAreKept) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(EarlyMixed({5, 6}, {true, false}));
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), std::nullopt);
  TargetPlayer player(schedule);
  player.Save(7);
  EXPECT_EQ(schedule.followed(), nullptr);
  EXPECT_THAT(schedule.known(), IsEmpty());
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 1u);
  player.EndStep();
  schedule.Learn(EarlyMixed({5, 6}, {true, false}));
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u);
  player.Save(7);
  StepRecord record = Chain({7});
  record.segments.resize(1);
  record.segments[0].before.emplace();
  SegmentChoice::Note(schedule.TakeRan(), record);
  EXPECT_FALSE(record.segments[0].before.has_value()) << "no mix has it";
}

TEST(TargetSchedule, AMixIsTriedFromTheFirstSegmentOn) {
  TargetSchedule schedule(Within(100 * kSize));
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
  const SegmentChoice::Ran ran = schedule.TakeRan();
  ASSERT_NE(ran.tried, nullptr);
  EXPECT_THAT(ran.computed_again, ElementsAre(true, false));
}

TEST(TargetSchedule, AStepThatBeginsWithASegmentIsAnotherThanOneThatDoesNot) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(EarlyMixed({1, 2}, {false, false}));
  TargetPlayer player(schedule);
  player.Save(1);
  EXPECT_EQ(schedule.followed(), nullptr);
  player.EndStep();
  schedule.Learn(Mixed({1, 2}));
  EXPECT_THAT(schedule.known(), SizeIs(2));
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u) << "the likely one begins without a segment";
}

TEST(TargetSchedule, KindsInTurnsThatComputeTheirFirstSegmentAgainAreNotForgotten) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(EarlyMixed({5, 6}, {true, false}));
  schedule.Learn(EarlyMixed({7, 8}, {true, false}));
  TargetPlayer player(schedule);
  for (const uint64_t signature : {5, 7, 7, 5, 5, 7}) {
    EXPECT_EQ(schedule.OnSegment(/*scope=*/1), std::nullopt);
    player.Save(signature);
    EXPECT_NE(schedule.followed(), nullptr);
    player.EndStep();
  }
  EXPECT_THAT(schedule.known(), SizeIs(2));
}

TEST(TargetSchedule, TheStepThatRanLastIsTakenToComeNext) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(Mixed({1, 2}));
  schedule.Learn(EarlyMixed({5, 6}, {true, false}));
  TargetPlayer player(schedule);
  player.Save(1);
  player.EndStep();
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u) << "the last one began without a segment";
  player.Save(5);
  player.EndStep();
  EXPECT_THAT(schedule.known(), SizeIs(2)) << "nothing was wrong with either";
}

TEST(TargetSchedule, SegmentsOfAScopeThatSavesNothingAreNoneOfTheNextStep) {
  TargetSchedule schedule(Within(100 * kSize));
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

TEST(TargetSchedule, AMixedStepThatAnotherOneBeginsLikeIsForgotten) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(Mixed({1, 2}));
  TargetPlayer player(schedule);
  player.Save(1);
  schedule.OnSegment(/*scope=*/1);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), std::nullopt);
  player.Save(7);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 2u) << "what comes now is kept";
  EXPECT_THAT(schedule.known(), IsEmpty());
}

TEST(TargetSchedule, AMixedStepThatIsLeftBeforeItHasMixedIsKept) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(Mixed({1, 2}));
  TargetPlayer player(schedule);
  player.Save(1);
  schedule.OnSegment(/*scope=*/1);
  player.Save(7);
  EXPECT_THAT(schedule.known(), SizeIs(1));
}

TEST(TargetSchedule, AMixIsTriedByAStepThatIsRecorded) {
  TargetSchedule schedule(Within(100 * kSize));
  StepRecord step = Chain({1, 2});
  step.segments.resize(2);
  schedule.Learn(std::make_shared<const KnownStep>(step, StepPlan(), absl::OkStatus(),
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
  const SegmentChoice::Ran ran = schedule.TakeRan();
  EXPECT_EQ(ran.tried->mix().size(), 1u);
  EXPECT_THAT(ran.computed_again, ElementsAre(false, true));
}

// With segments, all of which are kept, and this mix.
std::shared_ptr<const KnownStep> WithMix(const std::vector<uint64_t>& signatures,
                                         std::vector<uint32_t> mix) {
  StepRecord step = Chain(signatures);
  step.segments.resize(2);
  return std::make_shared<const KnownStep>(step, StepPlan(), absl::OkStatus(), std::move(mix));
}

TEST(TargetSchedule, StepsAreWorthRecordingUntilTheMixOfEachKindWasTried) {
  TargetSchedule schedule(Within(100 * kSize));
  const std::shared_ptr<const KnownStep> kinds[] = {WithMix({1, 2}, {0}), WithMix({5, 6}, {1})};
  for (const auto& kind : kinds) schedule.Learn(kind);
  TargetPlayer player(schedule);
  for (int turn = 0; turn < TargetSchedule::kKnownInARow; ++turn) {
    player.Play({1, 2});
    player.Play({5, 6});
  }
  EXPECT_TRUE(schedule.WantsRecord());
  schedule.Learn(kinds[0]->WithMixTried());
  EXPECT_TRUE(schedule.WantsRecord());
  schedule.Learn(kinds[1]->WithMixTried());
  EXPECT_FALSE(schedule.WantsRecord());
}

TEST(TargetSchedule, StepsAreWorthRecordingUntilEachKindWasSeenToHaveNoMix) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(WithMix({1, 2}, {}));
  TargetPlayer player(schedule);
  for (int step = 0; step < TargetSchedule::kKnownInARow; ++step) player.Play({1, 2});
  EXPECT_TRUE(schedule.WantsRecord());
  schedule.Learn(WithMix({1, 2}, {}));  // as it ran as planned
  EXPECT_FALSE(schedule.WantsRecord());
}

TEST(TargetSchedule, WhereAnotherKindBeginsAlikeNoMixIsTried) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(WithMix({1, 2}, {0}));
  schedule.Learn(WithMix({1, 3}, {0}));
  schedule.set_is_recorded(true);
  TargetPlayer player(schedule);
  player.Save(1);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u);
  player.EndStep();
  EXPECT_EQ(schedule.TakeRan().tried, nullptr);
}

TEST(TargetSchedule, AKindWithAMixThatDoesNotComeIsNotWaitedForForEver) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(WithMix({1, 2}, {0}));
  schedule.Learn(Planned(Chain({5, 6}), {}));
  TargetPlayer player(schedule);
  for (int step = 0; step < TargetSchedule::kKnownInARowForMixes; ++step) {
    EXPECT_TRUE(schedule.WantsRecord()) << step;
    player.Play({5, 6});
  }
  EXPECT_FALSE(schedule.WantsRecord());
}

// --- Another step than was thought ---

TEST(TargetSchedule, AStepGoesOnAsTheKnownOneThatBeginsLikeIt) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 7, 3, 4}), {{.object = 1, .drop_at = 4, .fetch_at = 8, .read_at = 8}}));
  schedule.Learn(
      Planned(Chain({1, 2, 7, 5, 6}), {{.object = 0, .drop_at = 3, .fetch_at = 8, .read_at = 9}}));
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

TEST(TargetSchedule, AStepThatSavesInAnotherOrderIsWhereItsLastUseIs) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({3, 1, 2}), {{.object = 1, .drop_at = 2, .fetch_at = 4, .read_at = 4}}));
  schedule.Learn(Planned(Chain({1, 2, 4}), {}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 0", "stay 1"));
  player.Save(3);
  EXPECT_THAT(player.Happened(), ElementsAre("stay 2", "out 0", "drop 0"));
}

TEST(TargetSchedule, WhatWasSavedBeforeWithTheSameSignatureIsCountedInTheOtherStep) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 1, 3}), {{.object = 1, .drop_at = 2, .fetch_at = 4, .read_at = 4}}));
  schedule.Learn(Planned(Chain({1, 1, 4}), {}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 1, 3});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 0", "stay 1", "stay 2", "out 1", "drop 1"));
}

TEST(TargetSchedule, WhatWasDueInTheStepThatWasThoughtIsNotDueAnyMore) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 9}), {{.object = 0, .drop_at = 5, .fetch_at = 6, .read_at = 7}}));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.HoldBack();
  player.SaveAll({1, 2, 3, 9});
  player.EndForward();
  EXPECT_THAT(player.Happened(), ElementsAre("stay 1", "stay 2", "stay 3", "out 0"));
}

TEST(TargetSchedule, WhatHasStayedLeavesLateOnlyOnce) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3}), {{.object = 0, .drop_at = 3, .fetch_at = 5, .read_at = 5}}));
  schedule.Learn(Planned(Chain({1, 2, 4}), {}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3});
  EXPECT_THAT(player.Happened(), ElementsAre("stay 0", "stay 1", "stay 2", "out 0"));
  player.Save(9);
  EXPECT_THAT(player.Happened(), ElementsAre("out 1", "out 2", "drop 0", "drop 1", "drop 2"));
}

TEST(TargetSchedule, OfSeveralThatBeginAlikeTheOneThatWasFollowedLastIsTriedFirst) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(Planned(Chain({1, 2, 3}), {}));
  schedule.Learn(
      Planned(Chain({1, 2, 5}), {{.object = 0, .drop_at = 2, .fetch_at = 4, .read_at = 5}}));
  TargetPlayer player(schedule);
  player.Save(1);
  EXPECT_THAT(player.Happened(), IsEmpty()) << "it leaves";
  player.SaveAll({2, 3});
  player.EndStep();
  player.Happened();
  player.Save(1);
  EXPECT_THAT(player.Happened(), ElementsAre("stay 0"));
}

TEST(TargetSchedule, OfSeveralThatBeginAlikeTheOneThatCameAfterTheLastStepBeforeIsTriedFirst) {
  TargetSchedule schedule(Within(100 * kSize));
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

TEST(TargetSchedule, WhenAStepTurnsOutToBeUnknownWhatHasStayedLeaves) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3});
  player.Happened();
  player.Save(9);
  EXPECT_THAT(player.Happened(), ElementsAre("out 1", "out 2", "drop 1", "drop 2"));
  player.EndForward();
  EXPECT_THAT(player.Happened(), ElementsAre("out 3", "drop 3"));
}

TEST(TargetSchedule, AnUnknownStepThatNeverEndsGivesNumbersOutAgain) {
  TargetSchedule schedule(Within(100 * kSize));
  const uint32_t kept = schedule.OnSaved(1, {kSize, 1}).object;
  for (uint64_t i = 0; i < 1000; ++i) {
    const Fate fate = schedule.OnSaved(1, {kSize, 2 + i});
    EXPECT_EQ(fate.object, kept + 1);
    schedule.OnReleased(fate.object);
  }
}

TEST(TargetSchedule, AnUnknownStepTakesTheLeastMemoryHoweverMuchThereIs) {
  TargetSchedule schedule(Within(100 * kSize));
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

TEST(TargetSchedule, WhatIsComputedAgainKeepsNobodyFromComingBackAhead) {
  StepRecord step = Chain({1, 2, 3});
  step.objects[1].recompute_us = 1;
  std::vector<Gap> gaps = GapsOf(step);  // of the first two
  ASSERT_EQ(gaps.size(), 2u);
  for (Gap& gap : gaps) {
    gap.away_from = gap.first;
    gap.away_until = gap.last;
  }
  gaps[0].away_until = 3;
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(Planned(step, MovesOf(step, gaps)));
  TargetPlayer player(schedule);
  player.Save(1);
  player.Save(2, kSize, TargetPlayer::kOwnOperator, /*frees=*/true, /*computed_again=*/true);
  player.Save(3);
  player.EndForward();
  EXPECT_THAT(player.Happened(), ElementsAre("out 0", "drop 0", "stay 2"));
  player.Read(2);
  player.Read(1);
  EXPECT_THAT(player.Happened(), ElementsAre("fetch 0", "compute 1"));
}

// --- Another step than was thought, by what it reads ---

TEST(TargetSchedule, AStepThatReadsMoreOftenThanTheKnownOneGoesOnLikeTheFirst) {
  TargetSchedule schedule(Within(100 * kSize));
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

TEST(TargetSchedule, AStepThatReadsInAnotherOrderGoesOnLikeTheFirst) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  player.Read(2);
  EXPECT_EQ(schedule.followed(), nullptr) << "tensor 3 was to be read first";
}

TEST(TargetSchedule, AReadOfWhatNobodyNeedsAnyMoreIsNotMissed) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  player.Release(3);
  player.Read(2);
  EXPECT_NE(schedule.followed(), nullptr);
}

TEST(TargetSchedule, AStepThatKeepsTheGraphThatTheKnownOneLetsGoOfGoesOnLikeTheFirst) {
  TargetSchedule schedule(Within(100 * kSize));
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

TEST(TargetSchedule, AStepWhoseBackwardMakesAGraphGoesOnLikeTheFirst) {
  TargetSchedule schedule(Within(100 * kSize));
  StepRecord step = Chain({1, 2, 3});
  for (StepObject& object : step.objects) object.needed_until = 6;
  schedule.Learn(Planned(step, {}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3});
  player.EndForward();
  player.ReadAndKeep(2);
  EXPECT_NE(schedule.followed(), nullptr);
  player.Read(1, TargetPlayer::kOwnOperator, Use::kReadIntoGraph);
  EXPECT_EQ(schedule.followed(), nullptr);
}

TEST(TargetSchedule, AStepInWhichSomethingIsNeededLongerGoesOnLikeTheFirst) {
  TargetSchedule schedule(Within(100 * kSize));
  StepRecord step = Chain({1, 2, 3, 4});
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
std::shared_ptr<const KnownStep> FourTensorsReadTwice(std::vector<StepMove> moves) {
  StepRecord step = Chain({1, 2, 3, 4});
  for (uint32_t object = 4; object-- > 0;) {
    step.objects[object].needed_until = 12 - object;
    step.uses.push_back(object);
  }
  step.stretches.resize(step.uses.size() + 1);
  return Planned(std::move(step), std::move(moves));
}

TEST(TargetSchedule, AStepGoesOnAsTheKnownOneThatReadsLikeIt) {
  TargetSchedule schedule(Within(100 * kSize));
  const auto twice =
      FourTensorsReadTwice({{.object = 1, .drop_at = 3, .fetch_at = 6, .read_at = 6}});
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

TEST(TargetSchedule, WhatIsFetchedForTheNextBackwardStaysAtTheEndOfThisOne) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensorsReadTwice({{.object = 0, .drop_at = 2, .fetch_at = 7, .read_at = 7},
                                       {.object = 3, .drop_at = 5, .fetch_at = 7, .read_at = 8}}));
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

// Object 0 comes for the first backward and is there for the second one, object 3 goes in between.
TEST(TargetSchedule, WhatHasComeBackInAGraphThatIsKeptStaysUnlessThePlanDropsIt) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensorsReadTwice({{.object = 3, .drop_at = 3, .fetch_at = 4, .read_at = 4},
                                       {.object = 0, .drop_at = 2, .fetch_at = 6, .read_at = 7},
                                       {.object = 3, .drop_at = 5, .fetch_at = 7, .read_at = 8}}));
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

TEST(TargetSchedule, WhatItsReaderIsAboutToReadStaysHoweverLittleRoomThereIs) {
  TargetSchedule schedule(Within(4 * kSize));
  schedule.Learn(FourTensorsReadTwice({{.object = 1, .drop_at = 3, .fetch_at = 5, .read_at = 6}}));
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

TEST(TargetSchedule, WhatWasFetchedAheadGoesAgainWhereMoreIsAllocatedThanWasPlanned) {
  TargetSchedule schedule(Within(4 * kSize));
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

TEST(TargetSchedule, OfWhatWasFetchedAheadTheLastToBeReadGoesFirst) {
  TargetSchedule schedule(Within(6 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 4, 5}), {{.object = 0, .drop_at = 4, .fetch_at = 5, .read_at = 9},
                                       {.object = 1, .drop_at = 4, .fetch_at = 5, .read_at = 8}}));
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

TEST(TargetSchedule, WhatWentAgainIsFetchedAheadOnceMoreWhenThereIsRoom) {
  TargetSchedule schedule(Within(6 * kSize));
  schedule.Learn(Planned(Chain({1, 2, 3, 4, 5, 6}),
                         {{.object = 0, .drop_at = 2, .fetch_at = 7, .read_at = 11}}));
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

TEST(TargetSchedule, WhatNobodyReadsAnyMoreLeavesFirst) {
  TargetSchedule schedule(Within(3 * kSize));
  StepRecord step = Chain({1, 2, 3});
  // Its first object is needed to the end, and not read.
  step.uses.pop_back();
  step.operators.resize(step.operators.empty() ? 0 : step.uses.size());
  step.stretches.pop_back();
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

TEST(TargetSchedule, WeightsThatVisitGiveWayToWhatWasPlanned) {
  TargetSchedule schedule(Within(4 * kSize));
  StepPlan plan;
  plan.peak_bytes = 4 * kSize;
  schedule.Learn(std::make_shared<const KnownStep>(Chain({1, 2, 3, 4}), plan));
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
TEST(TargetSchedule, WhatHasStayedForTheNextBackwardGoesWhereMoreIsAllocatedThanWasPlanned) {
  TargetSchedule schedule(Within(4 * kSize));
  schedule.Learn(FourTensorsReadTwice({{.object = 1, .drop_at = 3, .fetch_at = 5, .read_at = 6},
                                       {.object = 0, .drop_at = 2, .fetch_at = 6, .read_at = 7}}));
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
TEST(TargetSchedule, WhatASecondReaderHasNotReadGoesAtTheEndOfTheBackward) {
  TargetSchedule schedule(Within(100 * kSize));
  StepRecord step = Chain({1, 2, 3, 4});
  step.uses.push_back(0);
  step.stretches.resize(step.uses.size() + 1);
  schedule.Learn(Planned(step, {{.object = 0, .drop_at = 2, .fetch_at = 6, .read_at = 7}}));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  for (const size_t number : {3, 2, 1, 0}) player.Read(number);
  ASSERT_NE(schedule.followed(), nullptr);
  EXPECT_THAT(schedule.FetchedIn(TargetPlayer::kBackward), SizeIs(1));
}

TEST(TargetSchedule, WhatHasStayedForTheNextBackwardGoesWhenTheStepTurnsOutToBeUnknown) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensorsReadTwice({{.object = 0, .drop_at = 2, .fetch_at = 6, .read_at = 7}}));
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

TEST(TargetSchedule, AStepThatReadsOtherwiseMakesTheNextThreeWorthRecording) {
  TargetSchedule schedule(Within(3 * kSize));
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  for (int step = 0; step < TargetSchedule::kKnownInARow; ++step) player.Play({1, 2, 3, 4});
  ASSERT_FALSE(schedule.WantsRecord());
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  for (const size_t number : {3, 2, 3}) player.Read(number);
  player.EndStep();
  EXPECT_TRUE(schedule.WantsRecord());
}

TEST(TargetSchedule, OfThoseThatBeginLikeItAStepGoesOnAsOneThatFitsIntoTheTarget) {
  TargetSchedule schedule(Within(100 * kSize));
  const auto once = FourTensors();
  schedule.Learn(once);
  StepRecord twice = FourTensorsReadTwice({})->step();
  schedule.Learn(std::make_shared<const KnownStep>(std::move(twice), StepPlan(),
                                                   absl::ResourceExhaustedError("too little")));
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  EXPECT_EQ(schedule.followed(), once);
}

// --- What is remembered ---

TEST(TargetSchedule, StepsThatSaveTheSameAndReadItOtherwiseAreKeptSideBySide) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensors());
  schedule.Learn(FourTensorsReadTwice({}));
  EXPECT_THAT(schedule.known(), SizeIs(2));
  StepRecord kept = Chain({1, 2, 3, 4});
  kept.objects[3].needed_until = 8;
  schedule.Learn(Planned(kept, {}));
  EXPECT_THAT(schedule.known(), SizeIs(3));
  StepRecord in_their_order = Chain({1, 2, 3, 4});
  in_their_order.uses = {0, 1, 2, 3, 0, 1, 2, 3};
  schedule.Learn(Planned(in_their_order, {}));
  EXPECT_THAT(schedule.known(), SizeIs(4));
}

TEST(TargetSchedule, TheStepsThatWereFollowedLastAreKept) {
  TargetSchedule schedule(Within(100 * kSize));
  for (uint64_t signature = 1; signature <= TargetSchedule::kMaxKnown; ++signature) {
    schedule.Learn(Planned(Chain({signature}), {}));
  }
  TargetPlayer(schedule).Play({1});
  EXPECT_EQ(FirstSignatures(schedule).front(), 1u);
  schedule.Learn(Planned(Chain({1000}), {}));
  const std::vector<uint64_t> kept = FirstSignatures(schedule);
  EXPECT_THAT(kept, SizeIs(TargetSchedule::kMaxKnown));
  EXPECT_EQ(kept[0], 1000u);
  EXPECT_EQ(kept[1], 1u);
  EXPECT_EQ(kept.back(), 3u) << "2 is forgotten";
}

TEST(TargetSchedule, AStepThatSavesAndReadsTheSameTakesThePlaceOfTheOneBefore) {
  TargetSchedule schedule(Within(100 * kSize));
  schedule.Learn(FourTensors());
  schedule.Learn(Planned(Chain({1, 2}), {}));
  const std::shared_ptr<const KnownStep> again = Planned(Chain({1, 2, 3, 4}), {});
  schedule.Learn(again);
  EXPECT_THAT(schedule.known(), SizeIs(2));
  EXPECT_TRUE(schedule.known().front()->IsLike(again->step()));
}

TEST(TargetSchedule, AStepWhoseTensorsFreeOthersIsAnotherOne) {
  TargetSchedule schedule(Within(100 * kSize));
  StepRecord step = Chain({1, 2});
  schedule.Learn(Planned(step, {}));
  step.objects[1].frees = false;
  schedule.Learn(Planned(step, {}));
  EXPECT_THAT(schedule.known(), SizeIs(2));
}

// --- Plans ---

TEST(TargetSchedule, APlanKeepsWithinTheTarget) {
  const TargetSchedule schedule(Within(3 * kSize));
  const std::shared_ptr<const KnownStep> known = schedule.Plan(Chain({1, 2, 3, 4})).value();
  EXPECT_EQ(known->plan().peak_bytes, 3 * kSize);
  EXPECT_THAT(known->shortfall(), IsOk());
}

TEST(TargetSchedule, WhereTheTargetCannotBeMetThePlanIsTheLeastAndSaysWhy) {
  const TargetSchedule schedule(Within(kSize));
  const StepRecord step = Chain({1, 2, 3, 4});
  const std::shared_ptr<const KnownStep> known = schedule.Plan(step).value();
  EXPECT_EQ(known->plan().peak_bytes, LeastMemoryBytes(step).value());
  EXPECT_THAT(known->shortfall(),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("does not fit")));
}

TEST(TargetSchedule, OfATargetIsSetAsideAsMuchAsIsEnoughIfTheStepLeavesIt) {
  const StepRecord step = Chain({1, 2, 3, 4});
  const uint64_t least_bytes = LeastMemoryBytes(step).value();
  const SetAside aside = {.least_bytes = kSize, .enough_bytes = 2 * kSize};
  // What is enough and two objects more; what is enough; what is more than the least.
  for (const uint64_t beside_bytes : {4 * kSize, 2 * kSize, kSize + kSize / 2}) {
    const TargetSchedule schedule(Within(least_bytes + beside_bytes));
    const auto known = schedule.Plan(step, /*mixes=*/false, aside).value();
    EXPECT_THAT(known->shortfall(), IsOk());
    const uint64_t aside_bytes = std::min(beside_bytes, aside.enough_bytes);
    EXPECT_LE(known->plan().peak_bytes, least_bytes + beside_bytes - aside_bytes);
    EXPECT_GT(known->plan().peak_bytes, least_bytes + beside_bytes - aside_bytes - kSize);
  }
}

TEST(TargetSchedule, OfATargetAMarginStaysFreeWhereTheStepCanDoWithoutIt) {
  const StepRecord step = Chain({1, 2, 3, 4});
  const uint64_t least_bytes = LeastMemoryBytes(step).value();
  for (const uint64_t beside_bytes : {2 * kSize, kSize / 2, uint64_t{0}}) {
    const TargetSchedule schedule(Within(least_bytes + beside_bytes));
    const auto known = schedule.Plan(step, /*mixes=*/false, {}, /*margin_bytes=*/kSize).value();
    EXPECT_THAT(known->shortfall(), IsOk());
    EXPECT_LE(known->plan().peak_bytes, std::max(least_bytes, least_bytes + beside_bytes - kSize));
    EXPECT_EQ(known->memory_bytes(), least_bytes + beside_bytes) << "what it is judged by";
  }
}

TEST(TargetSchedule, WhatIsSetAsideIsPartOfTheLeastThatIsTold) {
  const StepRecord step = Chain({1, 2, 3, 4});
  const uint64_t least_bytes = LeastMemoryBytes(step).value();
  const TargetSchedule schedule(Within(least_bytes + kSize - 1));
  const auto known =
      schedule.Plan(step, /*mixes=*/false, {.least_bytes = kSize, .enough_bytes = 2 * kSize})
          .value();
  EXPECT_THAT(known->shortfall().message(),
              HasSubstr(absl::StrCat("target's least is ", least_bytes + kSize)));
}

TEST(TargetSchedule, AStepThatRunsAsPlannedPromisesItsPeakUntilItIsAnotherOne) {
  for (const bool moves : {true, false}) {
    TargetSchedule schedule(Within(moves ? 3 * kSize : 100 * kSize));
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

TEST(TargetSchedule, WhatShouldHaveGoneAndHasNotLeftIsPromisedBesideThePeak) {
  TargetSchedule schedule(Within(100 * kSize));
  const std::shared_ptr<const KnownStep> known = FourTensors();
  schedule.Learn(known);
  TargetPlayer player(schedule);
  player.HoldBack();
  const auto more_bytes = [&] {
    return schedule.Promise().value().most_bytes - known->plan().peak_bytes;
  };
  player.SaveAll({1, 2});
  EXPECT_EQ(more_bytes(), 0u);
  player.Save(3);  // by now tensor 0 is to be away
  EXPECT_EQ(more_bytes(), kSize);
  player.Save(4);
  EXPECT_EQ(more_bytes(), kSize);
  player.EndForward();  // it leaves
  EXPECT_EQ(more_bytes(), 0u);
}

TEST(TargetSchedule, WhatNeverLeavesIsPromisedBesideThePeakUntilItIsToBeBack) {
  for (const bool is_let_go : {false, true}) {
    TargetSchedule schedule(Within(100 * kSize));
    const std::shared_ptr<const KnownStep> known = FourTensors();
    schedule.Learn(known);
    TargetPlayer player(schedule);
    player.HoldBack();
    player.SaveAll({1, 2, 3, 4});
    const auto more_bytes = [&] {
      return schedule.Promise().value().most_bytes - known->plan().peak_bytes;
    };
    EXPECT_EQ(more_bytes(), kSize);
    if (is_let_go) {
      player.Release(0);
    } else {
      schedule.OnUsed(3, Use::kRead);
      schedule.OnUsed(2, Use::kRead);
      schedule.TakeFetches({1, 3}, /*backward=*/5, [](const ScheduledParcel&) { return true; });
    }
    EXPECT_EQ(more_bytes(), 0u);
  }
}

// What is promised beside the peak of the known step that is followed.
uint64_t MoreBytes(const TargetSchedule& schedule) {
  return schedule.Promise().value().most_bytes - schedule.followed()->plan().peak_bytes;
}

TEST(TargetSchedule, WhatGoesWhileOthersHoldItIsPromisedBesideThePeakUntilItIsReleased) {
  TargetSchedule schedule(Within(100 * kSize));
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

TEST(TargetSchedule, WhatFreesNothingWhereItWasRecordedIsNotPromisedBesideThePeak) {
  TargetSchedule schedule(Within(100 * kSize));
  StepRecord step = FourTensors()->step();
  step.objects[0].frees = false;
  schedule.Learn(Planned(step, FourTensors()->plan().moves));
  TargetPlayer player(schedule);
  player.Save(1);
  player.Hold(0);
  player.SaveAll({2, 3});
  EXPECT_THAT(player.Happened(), Contains("drop 0"));
  EXPECT_EQ(MoreBytes(schedule), 0u) << "it is among the other bytes";
}

TEST(TargetSchedule, WhatOthersHoldIsPromisedByTheKnownStepThatFollowsAsWell) {
  TargetSchedule schedule(Within(100 * kSize));
  const std::shared_ptr<const KnownStep> known = FourTensors();
  schedule.Learn(known);
  schedule.Learn(Planned(Chain({1, 2, 3, 9}), known->plan().moves));
  TargetPlayer player(schedule);
  player.Save(1);
  player.Hold(0);
  player.SaveAll({2, 3});
  ASSERT_NE(schedule.followed(), known);
  EXPECT_EQ(MoreBytes(schedule), kSize);
  player.Save(4);
  ASSERT_EQ(schedule.followed(), known);
  EXPECT_EQ(MoreBytes(schedule), kSize);
}

TEST(TargetSchedule, WhatOthersHoldIsPromisedEachTimeThatItIsToBeAway) {
  TargetSchedule schedule(Within(100 * kSize));
  StepRecord step = Chain({1, 2, 3, 4});
  step.uses.insert(step.uses.begin() + 6, 0);  // 0 1 2 3 | 3 2 0 1 0
  step.stretches.emplace_back();
  schedule.Learn(Planned(
      step, {{.object = 0, .drop_at = 2, .fetch_at = 4, .read_at = 6},
             {.object = 0, .drop_at = 7, .fetch_at = 8, .read_at = 8, .copies_out = false}}));
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

TEST(TargetSchedule, WhatOthersHeldUntilItWasFetchedIsGoneOnceItIsDroppedAgain) {
  TargetSchedule schedule(Within(100 * kSize));
  StepRecord step = Chain({1, 2, 3, 4});
  step.uses.insert(step.uses.begin() + 6, 0);
  step.stretches.emplace_back();
  schedule.Learn(Planned(
      step, {{.object = 0, .drop_at = 2, .fetch_at = 4, .read_at = 6},
             {.object = 0, .drop_at = 7, .fetch_at = 8, .read_at = 8, .copies_out = false}}));
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
TEST(TargetSchedule, WhatGoesEarlyWhileOthersHoldItIsPromisedOnceItIsToBeAway) {
  TargetSchedule schedule(Within(4 * kSize));
  schedule.Learn(
      Planned(Chain({1, 2, 3, 4, 5}), {{.object = 0, .drop_at = 4, .fetch_at = 7, .read_at = 9}}));
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

TEST(TargetSchedule, ThatAPlanIsNotRunIsSaidWhereItIsShown) {
  for (const uint64_t target_bytes : {kSize, 3 * kSize}) {
    SCOPED_TRACE(target_bytes);
    const TargetSchedule schedule(Within(target_bytes));
    const PlannedStep shown = schedule.Shown(*schedule.Plan(Chain({1, 2, 3, 4})).value());
    EXPECT_EQ(shown.limit_bytes, target_bytes);
    const bool says_so =
        ExplainPlan(shown).find("not run as planned: the step does not fit") != std::string::npos;
    EXPECT_EQ(says_so, target_bytes == kSize);
  }
}

TEST(TargetSchedule, ARecordThatIsNotValidIsNotPlanned) {
  StepRecord step = Chain({1});
  step.stretches.pop_back();
  EXPECT_THAT(TargetSchedule(Within(kSize)).Plan(step),
              StatusIs(absl::StatusCode::kInvalidArgument));
}

// --- Without a target ---

TargetOptions Auto() {
  return {.windows = {.eviction_bytes = 2 * kSize, .prefetch_bytes = kSize}, .link = RoundLink()};
}

TEST(TargetSchedule, WithoutATargetUnknownStepsRunByWindows) {
  TargetSchedule schedule(Auto());
  EXPECT_FALSE(schedule.AsksForDeviceBytes());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  EXPECT_THAT(player.Happened(),
              ElementsAre("out 0", "out 1", "out 2", "drop 0", "out 3", "drop 1"));
  player.Read(3);
  EXPECT_THAT(player.Happened(), ElementsAre("fetch 1"));
}

TEST(TargetSchedule, WithoutATargetWhatWasDroppedToMakeRoomIsFetchedAheadOnceMore) {
  TargetSchedule schedule(Auto());
  TargetPlayer player(schedule);
  player.SaveAll({1, 2, 3, 4});
  player.EndForward();
  player.Read(3);
  ASSERT_THAT(player.Happened(), Contains("fetch 1"));
  player.WantRoom();
  player.Read(2);
  EXPECT_THAT(player.Happened(), Contains("fetch 1"));
}

TEST(TargetSchedule, WithoutATargetAKnownStepRunsByItsPlan) {
  TargetSchedule schedule(Auto());
  schedule.Learn(FourTensors());
  TargetPlayer player(schedule);
  player.SetOtherBytes(1000 * kSize);
  player.Play({1, 2, 3, 4});
  EXPECT_THAT(player.Happened(),
              ElementsAre("stay 1", "out 0", "stay 2", "drop 0", "stay 3", "fetch 0"));
}

TEST(TargetSchedule, InAKnownStepNothingWaitsForCompany) {
  TargetOptions options = Auto();
  options.windows.full_batch_bytes = kSize;
  TargetSchedule schedule(options);
  schedule.Learn(FourTensors());
  EXPECT_GT(schedule.BatchBytes(), 0u);
  EXPECT_GT(schedule.LateBytes(), 0u);
  TargetPlayer player(schedule);
  player.Save(1);
  EXPECT_EQ(schedule.BatchBytes(), 0u);
  EXPECT_EQ(schedule.LateBytes(), 0u);
}

TEST(TargetSchedule, WithoutATargetThePlanIsNoSlowerThanItsCompute) {
  StepRecord step = Chain({1, 2, 3, 4});
  for (StepStretch& stretch : step.stretches) stretch.compute_us = 1;
  const TargetSchedule schedule(Auto());
  const std::shared_ptr<const KnownStep> known = schedule.Plan(step).value();
  EXPECT_LE(known->plan().step_us, TargetOptions::kSlowdown * step.compute_us());
  EXPECT_LT(known->plan().peak_bytes, 4 * kSize);
}

}  // namespace target_schedule_test
}  // namespace pinion::testing
