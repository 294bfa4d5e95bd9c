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
#include "pinion/engine/planner/plan_step.h"
#include "pinion/engine/planner/residency_planner.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/engine/schedule/offload_schedule.h"
#include "pinion/engine/schedule/plan_cache.h"
#include "pinion/engine/schedule/reservation.h"
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

using CachedPtr = std::shared_ptr<const CachedPlan>;

PlayedSchedule WithTarget(uint64_t memory_bytes, const std::vector<CachedPtr>& known = {}) {
  return PlayedSchedule(Within(memory_bytes), known);
}
PlayedSchedule WithAmpleTarget(const std::vector<CachedPtr>& known = {}) {
  return WithTarget(100 * kSize, known);
}

// Tensors with these signatures.
StepTrace Chain(const std::vector<uint64_t>& signatures) {
  return ForwardAndBackward(kSize, signatures);
}

// A plan of the test's own.
CachedPtr Planned(StepTrace step, std::vector<StepMove> moves = {}, uint64_t peak_bytes = 0) {
  return std::make_shared<const CachedPlan>(
      std::move(step), StepPlan{.moves = std::move(moves), .peak_bytes = peak_bytes});
}
// Each moved object is read when the backward reads it.
CachedPtr PlannedChain(const std::vector<uint64_t>& signatures, std::vector<StepMove> moves = {}) {
  const auto last_read = static_cast<uint32_t>(2 * signatures.size() - 1);
  for (StepMove& move : moves) move.read_at = last_read - move.object;
  return Planned(Chain(signatures), std::move(moves));
}

// Four tensors, uses 0 to 3 and in reverse 4 to 7. Tensor 0 goes when the third one has been saved,
// and is fetched when the third one is read.
CachedPtr FourTensors() {
  return PlannedChain({1, 2, 3, 4}, {{.object = 0, .evict_at = 2, .fetch_at = 5}});
}

// Four tensors. The operator behind the second one takes as much as three for a moment.
CachedPtr MuchBehindTheSecond() {
  StepTrace step = Chain({1, 2, 3, 4});
  step.intervals[2].transient_bytes = 3 * kSize;
  return Planned(std::move(step), {{.object = 0, .evict_at = 4, .fetch_at = 5, .read_at = 7}});
}

// Four tensors. Tensor 0 goes twice, and is read twice: 0 1 2 3 | 3 2 0 1 0.
CachedPtr FourTensorsOfWhichOneGoesTwice() {
  StepTrace step = Chain({1, 2, 3, 4});
  step.accesses.insert(step.accesses.begin() + 6, 0);
  step.intervals.emplace_back();
  return Planned(std::move(step),
                 {{.object = 0, .evict_at = 2, .fetch_at = 4, .read_at = 6},
                  {.object = 0, .evict_at = 7, .fetch_at = 8, .read_at = 8, .copies_out = false}});
}

// Five tensors. Tensor 0 goes when the third one has been saved, and is fetched when the fourth one
// is read.
CachedPtr FiveTensors() {
  return PlannedChain({1, 2, 3, 4, 5}, {{.object = 0, .evict_at = 2, .fetch_at = 6}});
}

// Returns the bytes that the peak_bound adds to the peak of the followed plan.
uint64_t MoreBytes(const PlannedSchedule& schedule) {
  return schedule.StepPeakBound().value().most_bytes - schedule.followed()->plan().peak_bytes;
}

// Plays the step until it is not worth recording. Returns how many of its runs were.
int PlayWhileRecorded(PlayedSchedule& played, const std::vector<uint64_t>& signatures) {
  int steps = 0;
  for (; played.schedule.WantsRecord() && steps < 1000; ++steps) played.player.Play(signatures);
  return steps;
}

std::vector<uint64_t> FirstSignatures(const PlannedSchedule& schedule) {
  std::vector<uint64_t> signatures;
  for (const auto& cached : schedule.cached()) {
    signatures.push_back(cached->step().objects[0].signature);
  }
  return signatures;
}

// --- Unknown steps ---

TEST(PlannedSchedule, AnUnknownStepTakesTheLeastMemoryHoweverMuchThereIs) {
  for (const auto& known : std::vector<std::vector<CachedPtr>>{{}, {PlannedChain({1, 2})}}) {
    SCOPED_TRACE(known.empty() ? "nothing is known" : "another step is known");
    auto [schedule, player] = WithAmpleTarget(known);
    EXPECT_THAT(player.SaveAll({7, 8, 9}), ElementsAre("out 0", "drop 0", "out 1", "drop 1"));
    EXPECT_THAT(player.EndForward(), ElementsAre("out 2", "drop 2"));
    EXPECT_THAT(player.Read({2, 2, 2}), ElementsAre("demand 2")) << "nothing is fetched ahead";
    EXPECT_THAT(player.Read(1), ElementsAre("drop 2", "demand 1"))
        << "each reader of tensor 2 has its own copy, and nobody else may have one for long";
    player.Release(1);
    EXPECT_THAT(player.Read(0), ElementsAre("demand 0"));
  }
}

TEST(PlannedSchedule, WithATargetNothingWaitsForABatch) {
  TargetOptions options = Within(100 * kSize);
  options.windows = {.eviction_bytes = 100 * kSize, .full_batch_bytes = kSize};
  const PlannedSchedule schedule(options);
  EXPECT_EQ(schedule.BatchBytes(), 0u);
  EXPECT_EQ(schedule.LateBytes(), 0u);
}

// An ample target and a link of which 20,000 bytes are small, so that tensors may share a parcel.
TargetOptions WithParcels() { return {.memory_bytes = 100 * kSize, .link = AssumedLink()}; }

// A parcel that comes back brings all that is in it, which nobody has planned for.
TEST(PlannedSchedule, WithATargetNothingSmallSharesAParcelUntilTheStepIsKnown) {
  TargetOptions options = WithParcels();
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
  PlannedSchedule schedule(WithParcels());
  schedule.Learn(PlannedChain({1, 2, 3}));
  const uint32_t first = schedule.OnSaved(/*scope=*/1, {kSize, 1}).object;
  const uint32_t second = schedule.OnSaved(/*scope=*/1, {kSize, 2}).object;
  schedule.OnSaved(/*scope=*/1, {kSize, /*signature=*/77});
  ASSERT_THAT(schedule.TakeDeferredOffloads(), ElementsAre(first, second));
  EXPECT_NE(schedule.BatchKey(first), 0u);
  EXPECT_NE(schedule.BatchKey(first), schedule.BatchKey(second));
}

TEST(PlannedSchedule, WhatIsSmallSharesAParcelWithWhatThePlanMovesAtTheSameTimes) {
  PlannedSchedule schedule(WithParcels());
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
  auto [schedule, player] = WithAmpleTarget();
  EXPECT_FALSE(schedule.IsInStep());
  player.SaveAll({1, 2});
  player.Release(1);
  EXPECT_TRUE(schedule.IsInStep());
  player.Release(0);
  EXPECT_FALSE(schedule.IsInStep());
}

// --- Steps worth recording ---

TEST(PlannedSchedule, TheFirstStepIsWorthRecording) {
  auto [schedule, player] = WithTarget(3 * kSize);
  EXPECT_TRUE(schedule.WantsRecord());
  player.Play({1, 2, 3, 4});
  EXPECT_TRUE(schedule.WantsRecord());
}

constexpr int kKnownInARow = PlannedSchedule::kKnownInARow;

TEST(PlannedSchedule, AfterThreeKnownStepsInARowNothingIsWorthRecording) {
  PlayedSchedule played = WithTarget(3 * kSize, {FourTensors()});
  EXPECT_EQ(PlayWhileRecorded(played, {1, 2, 3, 4}), kKnownInARow);
}

TEST(PlannedSchedule, AStepThatSavesOrReadsOtherwiseMakesTheNextThreeWorthRecording) {
  for (const bool saves_otherwise : {true, false}) {
    SCOPED_TRACE(saves_otherwise ? "saves otherwise" : "reads otherwise");
    PlayedSchedule played = WithTarget(3 * kSize, {FourTensors()});
    PlayWhileRecorded(played, {1, 2, 3, 4});
    if (saves_otherwise) {
      played.player.SaveAll({1, 2, 9});
    } else {
      played.player.PlayForward({1, 2, 3, 4});
      played.player.Read({3, 2, 3});
    }
    played.player.EndStep();
    EXPECT_EQ(PlayWhileRecorded(played, {1, 2, 3, 4}), kKnownInARow);
  }
}

TEST(PlannedSchedule, AStepThatIsNoLongerWhatIsKnownOfItIsWorthRecordingTwice) {
  PlayedSchedule played = WithTarget(3 * kSize, {FourTensors()});
  PlayWhileRecorded(played, {1, 2, 3, 4});
  played.schedule.RecordAgain(/*with_gradients=*/false);
  EXPECT_EQ(PlayWhileRecorded(played, {1, 2, 3, 4}), kKnownInARow);
  played.player.Save(1);
  played.schedule.RecordAgain(/*with_gradients=*/false);
  played.player.EndStep();
  EXPECT_EQ(PlayWhileRecorded(played, {1, 2, 3, 4}), 2) << "the running step has no record";
}

TEST(PlannedSchedule, StepsThatAddToGradientsAreRecordedAsOftenAsThoseThatMakeThem) {
  PlayedSchedule played = WithTarget(3 * kSize, {FourTensors()});
  for (const bool begins_with_gradients : {false, true}) {
    played.schedule.set_begins_with_gradients(begins_with_gradients);
    EXPECT_EQ(PlayWhileRecorded(played, {1, 2, 3, 4}), kKnownInARow) << begins_with_gradients;
  }
  played.schedule.set_begins_with_gradients(false);
  played.schedule.RecordAgain(/*with_gradients=*/true);
  EXPECT_FALSE(played.schedule.WantsRecord()) << "nothing is wrong with those";
  played.schedule.set_begins_with_gradients(true);
  EXPECT_TRUE(played.schedule.WantsRecord());
}

TEST(PlannedSchedule, AStepThatIsRaisedMayHaveAMixUnlessItWasTried) {
  StepTrace step = Chain({1, 2});
  step.segments.resize(1);
  for (const bool was_tried : {false, true}) {
    PlannedSchedule schedule(Within(100 * kSize));
    auto cached = Planned(step);
    if (was_tried) cached = cached->WithRecomputeTried();
    schedule.Learn(cached);
    schedule.LearnRaised(Planned(step.WithMore(kSize), {}), *cached);
    ASSERT_EQ(schedule.cached().size(), 1u);
    EXPECT_EQ(schedule.cached().front()->step().intervals[0].other_bytes, kSize);
    EXPECT_EQ(schedule.cached().front()->WantsRecomputeTrial(), !was_tried);
  }
}

TEST(PlannedSchedule, WhatIsForgottenRunsLikeTheFirstStepAndIsWorthRecording) {
  auto [schedule, player] = WithTarget(3 * kSize);
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
  const CachedPtr cached = FourTensors();
  auto [schedule, player] = WithAmpleTarget({cached});
  EXPECT_THAT(player.SaveAll({1, 2}), ElementsAre("stay 1", "out 0"));
  schedule.ForgetPlans();
  EXPECT_THAT(player.PlayForward({3, 4}), ElementsAre("stay 2", "drop 0", "stay 3"));
  EXPECT_EQ(schedule.followed(), cached);
  player.EndStep();
  player.Save(1);
  EXPECT_EQ(schedule.followed(), nullptr);
}

// How many of that many steps, which are all different, are recorded.
int RecordsOf(PlayedSchedule& played, uint64_t steps) {
  int records = 0;
  for (uint64_t step = 1; step <= steps; ++step) {
    const bool is_recorded = played.schedule.WantsRecord();
    played.player.Play({100 * step, 100 * step + 1});
    if (!is_recorded) continue;
    ++records;
    played.schedule.Learn(PlannedChain({100 * step, 100 * step + 1}));
  }
  return records;
}

TEST(PlannedSchedule, WhereStepsAreNeverAlikeTheyAreRecordedLessAndLessOften) {
  PlayedSchedule some = WithTarget(3 * kSize), many = WithTarget(3 * kSize);
  const int of_the_first = RecordsOf(some, 1000);
  EXPECT_LT(of_the_first, 250);
  EXPECT_LT(RecordsOf(many, 8000), of_the_first + 3 * PlannedSchedule::kMaxCached + 3);
}

TEST(PlannedSchedule, WhereStepsBeginToBeAlikeTheyAreRecordedAgainSoon) {
  PlayedSchedule played = WithTarget(3 * kSize);
  RecordsOf(played, 1000);
  int steps = 0;
  for (; !played.schedule.WantsRecord(); ++steps) played.player.Play({1, 2, 3, 4});
  EXPECT_LE(steps, 1000 / 32);
}

TEST(PlannedSchedule, AKnownStepAmongOthersMakesAllOfThemWorthRecording) {
  PlayedSchedule played = WithTarget(3 * kSize);
  RecordsOf(played, 1000);
  played.schedule.Learn(FourTensors());
  played.player.Play({1, 2, 3, 4});
  EXPECT_TRUE(played.schedule.WantsRecord());
  played.player.Play({7, 8});
  EXPECT_TRUE(played.schedule.WantsRecord());
}

TEST(PlannedSchedule, WhatWasFollowedIsToldUntilTheNextStepBegins) {
  auto [schedule, player] = WithTarget(3 * kSize);
  player.Play({1, 2, 3, 4});
  EXPECT_EQ(schedule.followed(), nullptr);
  const CachedPtr cached = FourTensors();
  schedule.Learn(cached);
  player.Play({1, 2, 3, 4});
  EXPECT_EQ(schedule.followed(), cached);
  player.Play({9});
  EXPECT_EQ(schedule.followed(), nullptr);
}

// --- A cached plan ---

TEST(PlannedSchedule, AKnownStepIsDroppedAtThePlannedUsesAndNotBefore) {
  auto [schedule, player] =
      WithAmpleTarget({PlannedChain({1, 2, 3, 4}, {{.object = 1, .evict_at = 3, .fetch_at = 6},
                                                   {.object = 0, .evict_at = 4, .fetch_at = 7}})});
  EXPECT_THAT(player.SaveAll({1, 2, 3}), ElementsAre("out 0", "stay 2", "out 1"));
  EXPECT_THAT(player.Save(4), ElementsAre("stay 3", "drop 1"));
  EXPECT_THAT(player.EndForward(), IsEmpty());
  EXPECT_THAT(player.Read(3), ElementsAre("drop 0"));
}

TEST(PlannedSchedule, AKnownStepIsFetchedFromThePlannedUsesOnAndNotBefore) {
  auto [schedule, player] = WithTarget(3 * kSize, {FourTensors()});
  player.PlayForward({1, 2, 3, 4});
  player.ReadAndRelease({3});
  EXPECT_THAT(player.Read(2), ElementsAre("fetch 0"));
}

// Tensor 1 is copied before tensor 0, which it is dropped before.
CachedPtr FourTensorsOfWhichOneWaits() {
  return PlannedChain({1, 2, 3, 4}, {{.object = 1, .evict_at = 2, .fetch_at = 5},
                                     {.object = 0, .evict_at = 3, .fetch_at = 6, .copy_at = 2}});
}

TEST(PlannedSchedule, WhatIsCopiedBehindOthersStaysUntilTheyHaveLeft) {
  auto [schedule, player] = WithAmpleTarget({FourTensorsOfWhichOneWaits()});
  EXPECT_THAT(player.SaveAll({1, 2}), ElementsAre("stay 0"));
  EXPECT_THAT(player.Save(3), ElementsAre("stay 2", "out 1", "out 0", "drop 1"));
  EXPECT_THAT(player.Save(4), ElementsAre("stay 3", "drop 0"));
}

TEST(PlannedSchedule, OfThoseThatWaitForOneUseTheFirstToBeDroppedLeavesFirst) {
  auto [schedule, player] = WithAmpleTarget(
      {PlannedChain({1, 2, 3, 4}, {{.object = 1, .evict_at = 3, .fetch_at = 6, .copy_at = 3},
                                   {.object = 0, .evict_at = 4, .fetch_at = 7, .copy_at = 3},
                                   {.object = 2, .evict_at = 3, .fetch_at = 5}})});
  player.SaveAll({1, 2, 3});
  EXPECT_THAT(player.Save(4), ElementsAre("stay 3", "out 2", "out 1", "out 0", "drop 1", "drop 2"));
}

TEST(PlannedSchedule, WhatComesWhenItsCopyIsDueDoesNotWait) {
  auto [schedule, player] = WithAmpleTarget({FourTensorsOfWhichOneWaits()});
  EXPECT_THAT(player.SaveAll({2, 3, 1}), ElementsAre("stay 1", "out 0", "drop 0"));
  EXPECT_THAT(player.Save(4), ElementsAre("stay 3", "out 2", "drop 2"));
}

TEST(PlannedSchedule, WhatWaitsInAStepThatIsAnotherOneLeavesWithTheRest) {
  auto [schedule, player] = WithAmpleTarget({FourTensorsOfWhichOneWaits()});
  EXPECT_THAT(player.SaveAll({1, 2}), ElementsAre("stay 0"));
  EXPECT_THAT(player.Save(77), ElementsAre("out 1", "out 0", "drop 1", "drop 0"));
}

// What leaves together has left when all of it has.
TEST(PlannedSchedule, OfWhatIsLargeOnlyWhatIsDroppedTogetherLeavesTogether) {
  PlannedSchedule schedule(Within(100 * kSize));
  schedule.Learn(PlannedChain({1, 2, 3, 4}, {{.object = 2, .evict_at = 3, .fetch_at = 4},
                                             {.object = 1, .evict_at = 4, .fetch_at = 5},
                                             {.object = 0, .evict_at = 3, .fetch_at = 6}}));
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
  auto [schedule, player] = WithTarget(
      5 * kSize,
      {PlannedChain({1, 2, 3, 4}, {{.object = 0, .evict_at = 5, .fetch_at = 6, .copy_at = 5}})});
  EXPECT_THAT(player.SaveAll({1, 2}), ElementsAre("stay 0", "stay 1"));
  player.SetOtherBytes(4 * kSize);
  EXPECT_THAT(player.Save(3), ElementsAre("stay 2", "out 0", "out 1", "drop 0", "drop 1"));
  player.SetOtherBytes(0);
  EXPECT_THAT(player.Save(4), ElementsAre("stay 3"));
}

TEST(PlannedSchedule, ItIsKnownThatBytesAreLackingUntilEnoughHasGone) {
  auto [schedule, player] = WithTarget(4 * kSize, {FourTensors()});
  player.Save(1);
  schedule.OnDeviceBytes(3 * kSize, /*streamed_bytes=*/0);
  EXPECT_FALSE(schedule.LacksBytes()) << "the next one is made";
  schedule.OnDeviceBytes(3 * kSize + 1, /*streamed_bytes=*/0);
  EXPECT_TRUE(schedule.LacksBytes());
}

TEST(PlannedSchedule, WhatItsReaderHasFetchedIsNotLackingAnyMore) {
  auto [schedule, player] = WithTarget(3 * kSize, {FourTensors()});
  player.PlayForward({1, 2, 3, 4});
  player.ReadAndRelease({3});
  player.SetOtherBytes(1);
  player.Read({2, 1});
  EXPECT_THAT(player.Read(0), Contains("demand 0")) << "the test's premise";
  ASSERT_NE(schedule.followed(), nullptr);
  schedule.OnDeviceBytes(3 * kSize, /*streamed_bytes=*/0);
  EXPECT_FALSE(schedule.LacksBytes());
  schedule.OnDeviceBytes(3 * kSize + 1, /*streamed_bytes=*/0);
  EXPECT_TRUE(schedule.LacksBytes());
}

TEST(PlannedSchedule, WeightsOfTheModelUsedLastGiveWayOnceNothingElseCanLeave) {
  auto [schedule, player] = WithTarget(4 * kSize, {FourTensors()});
  player.Save(1);
  const auto lacks = [&schedule = schedule](uint64_t device_bytes) {
    schedule.OnDeviceBytes(device_bytes, /*streamed_bytes=*/kSize);
    return schedule.LacksBytesWithWeights();
  };
  EXPECT_FALSE(lacks(3 * kSize)) << "the next one is made";
  EXPECT_TRUE(lacks(3 * kSize + 1));
  auto [unknown, other_player] = WithTarget(4 * kSize);
  other_player.Save(1);
  unknown.OnDeviceBytes(100 * kSize, /*streamed_bytes=*/kSize);
  EXPECT_FALSE(unknown.LacksBytesWithWeights());
}

// It has come to them in another order before it was known to be that step.
TEST(PlannedSchedule, AStepThatGoesOnAsAnotherOneKnowsWhetherItHasLeftOutUsesOfThat) {
  StepTrace much_at_first = Chain({1, 2, 3, 4});
  much_at_first.intervals[1].transient_bytes = 3 * kSize;
  for (const bool in_order : {true, false}) {
    const std::vector<uint64_t> likely =
        in_order ? std::vector<uint64_t>{1, 2, 3, 9} : std::vector<uint64_t>{1, 3, 2, 9};
    auto [schedule, player] = WithTarget(6 * kSize, {Planned(much_at_first), PlannedChain(likely)});
    player.SaveAll({likely[0], likely[1], likely[2], 4});
    ASSERT_NE(schedule.followed(), nullptr);
    ASSERT_EQ(schedule.followed()->step().objects.back().signature, 4u);
    schedule.OnDeviceBytes(4 * kSize, /*streamed_bytes=*/0);
    EXPECT_EQ(schedule.LacksBytes(), !in_order);
  }
}

TEST(PlannedSchedule, AStepThatIsNotKnownLacksNothingThatCouldLeave) {
  auto [schedule, player] = WithTarget(4 * kSize);
  player.Save(1);
  schedule.OnDeviceBytes(100 * kSize, /*streamed_bytes=*/0);
  EXPECT_FALSE(schedule.LacksBytes());
}

TEST(PlannedSchedule, IdleWeightsGiveWayByWhatAPlannedStepLacks) {
  auto [schedule, player] = WithTarget(4 * kSize, {FourTensors()});
  player.Save(1);
  schedule.OnDeviceBytes(3 * kSize, /*streamed_bytes=*/kSize);
  EXPECT_EQ(schedule.TakeWeightsBeside().most_bytes, UINT64_MAX) << "the next one fits";
  schedule.OnDeviceBytes(4 * kSize, /*streamed_bytes=*/2 * kSize);
  const PlannedSchedule::WeightsBeside beside = schedule.TakeWeightsBeside();
  EXPECT_EQ(beside.most_bytes, kSize);
  EXPECT_FALSE(beside.unless_in_use);
}

TEST(PlannedSchedule, AStepThatIsNotKnownAndItsBackwardBeginWithoutIdleWeights) {
  auto [schedule, player] = WithTarget(4 * kSize);
  const auto expect_none_once = [&schedule = schedule] {
    const PlannedSchedule::WeightsBeside beside = schedule.TakeWeightsBeside();
    EXPECT_EQ(beside.most_bytes, 0u);
    EXPECT_TRUE(beside.unless_in_use);
    EXPECT_EQ(schedule.TakeWeightsBeside().most_bytes, UINT64_MAX);
  };
  player.Save(1);
  expect_none_once();
  schedule.OnBackwardBegin(/*backward=*/1);
  expect_none_once();
}

// First what is read last, and no more than is missing.
TEST(PlannedSchedule, OfWhatThePlanKeepsAsMuchLeavesAsTheDeviceLacks) {
  auto [schedule, player] = WithTarget(5 * kSize, {PlannedChain({1, 2, 3, 4})});
  EXPECT_THAT(player.SaveAll({1, 2, 3}), ElementsAre("stay 0", "stay 1", "stay 2"));
  player.SetOtherBytes(kSize);
  EXPECT_THAT(player.Save(4), ElementsAre("stay 3"));
  player.SetOtherBytes(2 * kSize);
  EXPECT_THAT(player.Read(3), ElementsAre("out 0", "drop 0"));
  EXPECT_LE(player.device_bytes(), 5 * kSize);
  player.Release(3);
  EXPECT_THAT(player.ReadAndRelease({2, 1, 0}), ElementsAre("demand 0"));
}

// The next operator may fetch a layer before the schedule is asked again.
TEST(PlannedSchedule, AStepThatHasMoreThanPlannedLeavesStreamedWeightsTheirRoom) {
  for (const uint64_t streamed_bytes : {uint64_t{0}, kSize, 2 * kSize}) {
    const StepPlan plan = {.moves = {}, .peak_bytes = 4 * kSize};
    auto [schedule, player] = WithTarget(
        7 * kSize, {std::make_shared<const CachedPlan>(Chain({1, 2, 3, 4}), plan, absl::OkStatus(),
                                                       std::vector<uint32_t>(), 5 * kSize)});
    player.SetStreamedBytes(streamed_bytes);
    EXPECT_THAT(player.PlayForward({1, 2, 3, 4}),
                ElementsAre("stay 0", "stay 1", "stay 2", "stay 3"));
    player.SetOtherBytes(kSize);
    EXPECT_THAT(player.ReadAndRelease({3}), IsEmpty());
    player.SetOtherBytes(3 * kSize);
    EXPECT_THAT(player.Read(2), ElementsAre("out 0", "drop 0"))
        << streamed_bytes << " bytes of weights are there";
  }
}

// It would come back at once, as a copy that nobody has counted.
TEST(PlannedSchedule, WhatIsReadNowIsNotDroppedForItsOwnReader) {
  StepTrace step = Chain({1, 2, 3, 4});
  step.accesses.push_back(3);  // 0 1 2 3 | 3 2 1 0 3
  step.intervals.emplace_back();
  auto [schedule, player] = WithTarget(
      5 * kSize, {Planned(step, {{.object = 0, .evict_at = 5, .fetch_at = 6, .read_at = 7},
                                 {.object = 3, .evict_at = 5, .fetch_at = 7, .read_at = 8}})});
  player.PlayForward({1, 2, 3, 4});
  player.SetOtherBytes(3 * kSize);
  EXPECT_THAT(player.Read(3), ElementsAre("out 1", "drop 0", "drop 1"));
}

// Weights in use may take more than was set reservation for them.
TEST(PlannedSchedule, WhatHasLeftGivesWayToStreamedWeights) {
  auto [schedule, player] = WithTarget(
      5 * kSize,
      {Planned(Chain({1, 2, 3, 4}), {{.object = 0, .evict_at = 5, .fetch_at = 6, .read_at = 7}},
               /*peak_bytes=*/4 * kSize)});
  player.SetStreamedBytes(2 * kSize);
  player.SaveAll({1, 2});
  EXPECT_TRUE(player.IsHere(0));
  player.Save(3);
  EXPECT_FALSE(player.IsHere(0));
  EXPECT_TRUE(player.IsHere(1)) << "which the plan keeps";
}

// Dropping it would free nothing by now.
TEST(PlannedSchedule, WhatTheProgramHoldsDoesNotLeaveForTheTarget) {
  StepTrace step = Chain({1, 2, 3, 4});
  step.objects[0].held_until = 5;
  step.objects[1].frees = false;
  auto [schedule, player] = WithTarget(4 * kSize, {Planned(step)});
  player.SaveAll({1, 2, 3});
  player.SetOtherBytes(2 * kSize);
  EXPECT_THAT(player.Save(4), ElementsAre("stay 3", "out 2", "drop 2"));
}

TEST(PlannedSchedule, WhereAllIsToGoWhatWaitsLeaves) {
  auto [schedule, player] = WithAmpleTarget(
      {PlannedChain({1, 2, 3, 4}, {{.object = 0, .evict_at = 5, .fetch_at = 6, .copy_at = 5}})});
  player.SaveAll({1, 2});
  EXPECT_THAT(schedule.TakeAllEvictions(), IsEmpty());
  EXPECT_THAT(player.Save(3), ElementsAre("stay 2", "out 0"));
}

TEST(PlannedSchedule, WhatGoesWhileItWaitsIsNotAskedForAgain) {
  auto [schedule, player] = WithAmpleTarget({FourTensorsOfWhichOneWaits()});
  player.SaveAll({1, 2});
  player.Release(0);
  EXPECT_THAT(player.Save(3), ElementsAre("stay 2", "out 1", "drop 1"));
}

TEST(PlannedSchedule, FetchesComeInTheOrderOfThePlan) {
  auto [schedule, player] =
      WithAmpleTarget({PlannedChain({1, 2, 3, 4}, {{.object = 2, .evict_at = 3, .fetch_at = 4},
                                                   {.object = 0, .evict_at = 2, .fetch_at = 4},
                                                   {.object = 1, .evict_at = 3, .fetch_at = 5}})});
  player.PlayForward({1, 2, 3, 4});
  EXPECT_THAT(player.Read(3), ElementsAre("fetch 2", "fetch 0"));
  EXPECT_THAT(player.Read(2), ElementsAre("fetch 1"));
}

TEST(PlannedSchedule, WhatIsDroppedTwiceIsFetchedTwice) {
  auto [schedule, player] = WithAmpleTarget({FourTensorsOfWhichOneGoesTwice()});
  player.PlayForward({1, 2, 3, 4});
  EXPECT_THAT(player.Read({3, 2, 0}), ElementsAre("fetch 0"));
  EXPECT_THAT(player.Read(1), ElementsAre("drop 0"));
  EXPECT_THAT(player.Read(0), ElementsAre("demand 0"));
}

TEST(PlannedSchedule, WhatItsLastReaderHasFetchedIsNotFetchedOnceMoreForNobody) {
  auto [schedule, player] =
      WithAmpleTarget({PlannedChain({1, 2, 3}, {{.object = 0, .evict_at = 2, .fetch_at = 5}})});
  player.PlayForward({1, 2, 3});
  player.Read({2, 1});
  EXPECT_THAT(player.ReadLast(0), ElementsAre("demand 0"));
}

TEST(PlannedSchedule, WhatHasGoneToMakeRoomIsNotDroppedOnceMore) {
  StepTrace step = Chain({1, 2, 3, 4});
  step.accesses = {0, 0, 1, 2, 3,
                   3, 2, 0, 1, 0};  // a branch saves tensor 0 again, and reads it first
  step.intervals.resize(step.accesses.size() + 1);
  step.objects[0].saved_until = 1;
  auto [schedule, player] = WithAmpleTarget({Planned(
      step, {{.object = 0, .evict_at = 3, .fetch_at = 5, .read_at = 7},
             {.object = 0, .evict_at = 8, .fetch_at = 9, .read_at = 9, .copies_out = false}})});
  player.PlayForward({1, 2, 3, 4});
  player.Read(3);
  EXPECT_TRUE(player.IsHere(0));
  player.WantRoom();
  player.Read(2);
  player.WantRoom();
  EXPECT_THAT(player.Read(1), IsEmpty()) << "it was to be read before, so its reader fetches it";
  EXPECT_THAT(player.Read(0), ElementsAre("demand 0"));
}

TEST(PlannedSchedule, NothingSmallSharesAParcelWhileTheStepMayBeOneThatMovesLessOfIt) {
  PlannedSchedule schedule(WithParcels());
  const auto step = [](uint64_t last_signature) {
    StepTrace step = Chain({1, 2, 3, last_signature});
    step.operators = {0, 1, 2, 3, 4, 5, 6, 6};  // one reads the first two
    return step;
  };
  const StepMove first = {.object = 0, .evict_at = 3, .fetch_at = 5, .read_at = 7};
  const StepMove second = {.object = 1, .evict_at = 3, .fetch_at = 5, .read_at = 6};
  schedule.Learn(Planned(step(5), {first}));
  schedule.Learn(Planned(step(4), {first, second}));
  const auto share_a_parcel = [&] { return schedule.BatchKey(0) == schedule.BatchKey(1); };
  for (const uint64_t signature : {1, 2, 3}) schedule.OnSaved(/*scope=*/1, {kSize, signature});
  EXPECT_FALSE(share_a_parcel());
  schedule.OnSaved(/*scope=*/1, {kSize, 4});
  EXPECT_TRUE(share_a_parcel()) << "it is the one that moves both";
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
  // Offloads and evicts the parcel, and fetches it behind an access of the third tensor.
  void LeaveAndComeBack(AccessKind access) {
    Leave();
    schedule_.OnSaved(kScope, {kSize, 3});
    schedule_.TakeEvictions();
    schedule_.OnUsed(2, access);
    schedule_.OnFetched(parcel_, /*backward=*/5);
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
  LeaveAndComeBack(AccessKind::kRead);
  schedule_.OnUsed(0, AccessKind::kRead);
  schedule_.OnUsed(1, AccessKind::kRead);
  EXPECT_THAT(schedule_.TakeEvictions(), IsEmpty());
}

// Dropping it once more would need all that is in it.
TEST_F(PlannedScheduleOfAGroup, InAGraphThatIsKeptItDoesNotStayForTheNextBackward) {
  LeaveAndComeBack(AccessKind::kReadAndKept);
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
  auto [schedule, player] =
      WithAmpleTarget({PlannedChain({1, 2, 3, 4}, {{.object = 1, .evict_at = 3, .fetch_at = 5},
                                                   {.object = 0, .evict_at = 3, .fetch_at = 5}})});
  EXPECT_THAT(player.PlayForward({1, 3, 4}), ElementsAre("stay 1", "out 0", "stay 2", "drop 0"));
  EXPECT_THAT(player.Read({2, 1, 0}), ElementsAre("fetch 0"));
}

TEST(PlannedSchedule, WhatIsToBeBackAlreadyIsNotDroppedAnyMore) {
  auto [schedule, player] = WithAmpleTarget(
      {PlannedChain({1, 2, 3, 4, 5}, {{.object = 0, .evict_at = 2, .fetch_at = 3}})});
  EXPECT_THAT(player.SaveAll({1, 2, 5}), ElementsAre("stay 1", "out 0", "stay 2"));
}

TEST(PlannedSchedule, WhatThePlanDoesNotMoveStaysInEachRunOfTheStep) {
  auto [schedule, player] = WithTarget(3 * kSize, {FourTensors()});
  for (int step = 0; step < 2; ++step) {
    EXPECT_THAT(player.Play({1, 2, 3, 4}),
                ElementsAre("stay 1", "out 0", "stay 2", "drop 0", "stay 3", "fetch 0"))
        << step;
  }
}

TEST(PlannedSchedule, WhatABranchSavesAndReadsOnceMoreDoesNotDisturbTheRest) {
  StepTrace step = Chain({1, 2, 3});
  step.accesses = {0, 1, 1, 2,
                   2, 1, 1, 0};  // the second of two operators that save and read tensor 1
  step.intervals.resize(step.accesses.size() + 1);
  step.objects[1].saved_until = 2;
  auto [schedule, player] =
      WithAmpleTarget({Planned(step, {{.object = 0, .evict_at = 3, .fetch_at = 5, .read_at = 7}})});
  player.PlayForward({1, 2, 3});
  player.Read(2);
  EXPECT_THAT(player.Read(1), ElementsAre("fetch 0"));
  player.Read(0);
  EXPECT_NE(schedule.followed(), nullptr);
}

TEST(PlannedSchedule, WhatNobodyNeedsAnyMoreIsNotFetched) {
  auto [schedule, player] = WithAmpleTarget({FourTensors()});
  player.PlayForward({1, 2, 3, 4});
  player.Release(0);
  EXPECT_THAT(player.Read({3, 2}), IsEmpty());
}

// --- Bytes actually allocated ---

TEST(PlannedSchedule, WhereMoreIsAllocatedThanWasPlannedTheOldestThatHasLeftGoesEarly) {
  auto [schedule, player] = WithTarget(
      4 * kSize, {PlannedChain({1, 2, 3, 4, 5}, {{.object = 1, .evict_at = 4, .fetch_at = 6},
                                                 {.object = 0, .evict_at = 4, .fetch_at = 7}})});
  EXPECT_THAT(player.SaveAll({1, 2, 3}), ElementsAre("out 0", "stay 2", "out 1"));
  player.EndStep();
  EXPECT_THAT(player.SaveAll({1, 2}), ElementsAre("out 0"));
  player.SetOtherBytes(1);
  EXPECT_THAT(player.Save(3), ElementsAre("stay 2", "out 1", "drop 0"));
}

TEST(PlannedSchedule, WhatIsToComeUntilTheNextUseCountsAsAllocated) {
  StepTrace step = Chain({1, 2, 3});
  step.intervals[2].transient_bytes = kSize;
  auto [schedule, player] = WithTarget(
      4 * kSize, {Planned(step, {{.object = 0, .evict_at = 3, .fetch_at = 5, .read_at = 5}})});
  EXPECT_THAT(player.SaveAll({1, 2}), ElementsAre("stay 1", "out 0"));
  player.EndStep();
  player.SetOtherBytes(1);
  EXPECT_THAT(player.SaveAll({1, 2}), ElementsAre("stay 1", "out 0", "drop 0"))
      << "two are there, the third is made, and its operator takes as much again";
}

TEST(PlannedSchedule, AStepThatLeavesUsesOutCountsWhatAnyOfThemTakes) {
  auto [schedule, player] = WithTarget(4 * kSize, {MuchBehindTheSecond()});
  EXPECT_THAT(player.SaveAll({1, 2, 3}), ElementsAre("stay 1", "out 0", "drop 0", "stay 2"))
      << "behind the second one it is four";
  player.EndStep();
  EXPECT_THAT(player.SaveAll({1, 3}), ElementsAre("stay 1", "out 0", "drop 0"))
      << "what is left out may come, and with it what it takes";
}

TEST(PlannedSchedule, WhatWasLeftOutOfTheStepThatItGoesOnAsCountsToo) {
  auto [schedule, player] = WithTarget(4 * kSize, {MuchBehindTheSecond(), PlannedChain({1, 3})});
  EXPECT_THAT(player.SaveAll({1, 3}), ElementsAre("stay 0", "stay 1"));
  EXPECT_THAT(player.Save(4), ElementsAre("stay 2", "out 0", "out 1", "drop 0", "drop 1"))
      << "it leaves 2 out, behind which it is four";
}

TEST(PlannedSchedule, GrowthThatExceedsTheTargetOrWouldIsToldOnceWithItsAccess) {
  auto [schedule, player] = WithTarget(4 * kSize, {PlannedChain({1, 2, 3})});
  schedule.OnGrowth(9 * kSize, /*exceeds=*/true);
  EXPECT_THAT(schedule.TakeGrown(), IsEmpty()) << "no step has run";
  player.SaveAll({1, 2});
  schedule.OnGrowth(kSize, /*exceeds=*/true);
  EXPECT_THAT(schedule.TakeGrown(), IsEmpty()) << "the record has as much";
  schedule.OnGrowth(2 * kSize, /*exceeds=*/true);
  player.Save(3);
  schedule.OnGrowth(3 * kSize, /*exceeds=*/true);
  schedule.OnGrowth(4 * kSize, /*exceeds=*/false);
  const std::vector<PlannedSchedule::Grown> grown = schedule.TakeGrown();
  ASSERT_THAT(grown, SizeIs(1)) << "the plan is made again once";
  EXPECT_EQ(grown.front().cached, schedule.followed());
  ASSERT_THAT(grown.front().exceeding, SizeIs(2));
  for (const uint32_t i : {0, 1}) {
    EXPECT_EQ(grown.front().exceeding[i].access, i + 1);
    EXPECT_EQ(grown.front().exceeding[i].size_bytes, (i + 2) * kSize);
  }
  ASSERT_THAT(grown.front().fitting, SizeIs(1));
  EXPECT_EQ(grown.front().fitting.front().access, 2u);
  EXPECT_EQ(grown.front().fitting.front().size_bytes, 4 * kSize);
  EXPECT_THAT(schedule.TakeGrown(), IsEmpty());
  player.Save(9);
  ASSERT_EQ(schedule.followed(), nullptr);
  schedule.OnGrowth(9 * kSize, /*exceeds=*/true);
  EXPECT_THAT(schedule.TakeGrown(), IsEmpty()) << "no plan is followed";
}

// A decoder that makes one more token in each step.
TEST(PlannedSchedule, OnceAStepHasExceededTheTargetBeforeItDifferedTheNextLeaveRoomUntilTheyRead) {
  StepTrace step = Chain({1, 2, 3});
  step.intervals[1].transient_bytes = 3 * kSize;
  const CachedPtr known = Planned(std::move(step));
  for (const auto& [exceeds, differs_at_once] :
       {std::pair(true, false), {false, true}, {true, true}}) {
    auto [schedule, player] = WithTarget(8 * kSize, {known});
    player.SaveAll({1, 2});
    if (!differs_at_once) schedule.OnGrowth(6 * kSize, exceeds);
    player.Save(3);
    if (differs_at_once) schedule.OnGrowth(6 * kSize, exceeds);
    player.Save(4);
    player.EndStep();
    player.SaveAll({1, 2, 3});
    ASSERT_EQ(schedule.followed(), known);
    schedule.OnDeviceBytes(6 * kSize, 0);
    EXPECT_EQ(schedule.LacksBytes(), exceeds && differs_at_once)
        << "it may go on, and take 4 * kSize";
    player.Read(2);
    schedule.OnDeviceBytes(6 * kSize, 0);
    EXPECT_FALSE(schedule.LacksBytes());
  }
}

TEST(PlannedSchedule, WhereMoreIsAllocatedThanWasPlannedFetchesWait) {
  auto [schedule, player] = WithTarget(3 * kSize, {FourTensors()});
  player.PlayForward({1, 2, 3, 4});
  player.ReadAndRelease({3});
  player.SetOtherBytes(1);
  EXPECT_THAT(player.Read(2), IsEmpty());
  player.SetOtherBytes(0);
  EXPECT_THAT(player.Read(1), ElementsAre("fetch 0"));
}

TEST(PlannedSchedule, FetchesLeaveRoomForWhatIsToComeUntilTheNextUse) {
  StepTrace step = Chain({1, 2, 3, 4});
  step.intervals[6].transient_bytes = 2 * kSize;
  auto [schedule, player] = WithTarget(
      4 * kSize, {Planned(step, {{.object = 0, .evict_at = 2, .fetch_at = 5, .read_at = 7}})});
  player.PlayForward({1, 2, 3, 4});
  player.ReadAndRelease({3});
  EXPECT_THAT(player.Read(2), IsEmpty());
  EXPECT_THAT(player.Read(1), ElementsAre("fetch 0"));
}

TEST(PlannedSchedule, AFetchThatWasRefusedIsAskedForAgain) {
  auto [schedule, player] = WithAmpleTarget({FiveTensors()});
  player.PlayForward({1, 2, 3, 4, 5});
  player.Read(4);
  player.RefuseOneFetch();
  EXPECT_THAT(player.Read(3), IsEmpty());
  EXPECT_THAT(schedule.FetchedAhead(), IsEmpty());
  EXPECT_THAT(player.Read(2), IsEmpty()) << "a refusal is expensive: the next attempt is left out";
  EXPECT_THAT(player.Read(1), ElementsAre("fetch 0"));
}

TEST(PlannedSchedule, ANewBackwardTriesAtOnceWhatWasRefusedInTheOneBefore) {
  auto [schedule, player] = WithAmpleTarget({FiveTensors()});
  player.PlayForward({1, 2, 3, 4, 5});
  player.Read(4);
  player.RefuseOneFetch();
  player.Read(3);
  schedule.OnBackwardBegin(TargetPlayer::kBackward + 1);
  EXPECT_THAT(player.Read(2), ElementsAre("fetch 0"));
}

TEST(PlannedSchedule, WithoutATargetInBytesWhatTheProgramHoldsLeavesOnlyByAPlan) {
  PlannedSchedule schedule(TargetOptions{.link = RoundLink()});
  EXPECT_FALSE(schedule.OnSaved(/*scope=*/1, {kSize, /*signature=*/77}).even_if_held);
  schedule.OnReleased(0);
  schedule.Learn(FourTensors());
  EXPECT_TRUE(schedule.OnSaved(/*scope=*/1, {kSize, /*signature=*/1}).even_if_held);
}

TEST(PlannedSchedule, AFetchThatWasDroppedToMakeRoomIsAskedForAgain) {
  auto [schedule, player] = WithTarget(3 * kSize, {FourTensors()});
  player.PlayForward({1, 2, 3, 4});
  player.ReadAndRelease({3});
  player.Read(2);
  EXPECT_THAT(schedule.FetchedAhead(), SizeIs(1));
  player.WantRoom();
  EXPECT_THAT(player.Read(1), ElementsAre("fetch 0"));
}

// --- Recomputable segments ---

// Which segments are computed again, and which ones a trial may compute again besides.
CachedPtr WithSegments(const std::vector<uint64_t>& signatures, const std::vector<bool>& again,
                       std::vector<uint32_t> recompute_set, uint32_t early_segments) {
  StepTrace step = Chain(signatures);
  step.early_segments = early_segments;
  for (const bool is_again : again) step.segments.emplace_back().is_recomputed = is_again;
  return std::make_shared<const CachedPlan>(std::move(step), StepPlan(), absl::OkStatus(),
                                            std::move(recompute_set));
}

// Of two segments the second one is computed again.
CachedPtr Mixed(const std::vector<uint64_t>& signatures) {
  return WithSegments(signatures, {false, true}, {}, /*early_segments=*/0);
}

// Both segments are kept.
CachedPtr WithMix(const std::vector<uint64_t>& signatures, std::vector<uint32_t> recompute_set) {
  return WithSegments(signatures, {false, false}, std::move(recompute_set), /*early_segments=*/0);
}

// The first segment begins before anything is saved.
CachedPtr EarlyMixed(const std::vector<uint64_t>& signatures, const std::vector<bool>& again,
                     std::vector<uint32_t> recompute_set = {}) {
  return WithSegments(signatures, again, std::move(recompute_set), /*early_segments=*/1);
}

TEST(PlannedSchedule, SegmentsAreComputedAgainAsTheKnownStepSays) {
  auto [schedule, player] = WithAmpleTarget({Mixed({1, 2})});
  player.Save(1);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), std::nullopt);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 2u);
}

TEST(PlannedSchedule, ASegmentThatAStepBeginsWithIsComputedAgainAsTheLikelyStepSays) {
  auto [schedule, player] = WithAmpleTarget();
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u) << "nothing is known";
  EXPECT_TRUE(schedule.HasBegun());
  EXPECT_FALSE(schedule.IsInStep());
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
  StepTrace adds = EarlyMixed({5, 6}, {true, false})->step();
  adds.begins_with_gradients = true;
  auto [schedule, player] = WithAmpleTarget({Planned(adds), EarlyMixed({5, 6}, {false, false})});
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
  auto [schedule, player] = WithAmpleTarget({EarlyMixed({5, 6}, {true, false})});
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), std::nullopt);
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
  auto [schedule, player] = WithAmpleTarget({EarlyMixed({1, 2}, {false, false}, /*mix=*/{0})});
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
  auto [schedule, player] = WithAmpleTarget({EarlyMixed({1, 2}, {false, false})});
  player.Save(1);
  EXPECT_EQ(schedule.followed(), nullptr);
  player.EndStep();
  schedule.Learn(Mixed({1, 2}));
  EXPECT_THAT(schedule.cached(), SizeIs(2));
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u) << "the likely one begins without a segment";
}

TEST(PlannedSchedule, KindsInTurnsThatComputeTheirFirstSegmentAgainAreNotForgotten) {
  auto [schedule, player] =
      WithAmpleTarget({EarlyMixed({5, 6}, {true, false}), EarlyMixed({7, 8}, {true, false})});
  for (const uint64_t signature : {5, 7, 7, 5, 5, 7}) {
    EXPECT_EQ(schedule.OnSegment(/*scope=*/1), std::nullopt);
    player.Save(signature);
    EXPECT_NE(schedule.followed(), nullptr);
    player.EndStep();
  }
  EXPECT_THAT(schedule.cached(), SizeIs(2));
}

TEST(PlannedSchedule, TheStepThatRanLastIsTakenToComeNext) {
  auto [schedule, player] = WithAmpleTarget({Mixed({1, 2}), EarlyMixed({5, 6}, {true, false})});
  player.Save(1);
  player.EndStep();
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u) << "the last one began without a segment";
  player.Save(5);
  player.EndStep();
  EXPECT_THAT(schedule.cached(), SizeIs(2)) << "nothing was wrong with either";
}

TEST(PlannedSchedule, SegmentsOfAScopeThatSavesNothingAreNoneOfTheNextStep) {
  auto [schedule, player] = WithAmpleTarget();
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u);
  schedule.OnScopeEnd(2);
  EXPECT_TRUE(schedule.HasBegun()) << "it was another scope's end";
  EXPECT_EQ(schedule.OnSegment(/*scope=*/2), 1u);
  schedule.OnScopeEnd(1);
  EXPECT_FALSE(schedule.HasBegun());
  player.Save(1);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u);
  schedule.OnScopeEnd(1);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 1u) << "the step goes on";
}

TEST(PlannedSchedule, AMixedStepThatAnotherOneBeginsLikeIsForgottenOnceItHasMixed) {
  for (const bool has_mixed : {true, false}) {
    SCOPED_TRACE(has_mixed ? "has mixed" : "has not mixed");
    auto [schedule, player] = WithAmpleTarget({Mixed({1, 2})});
    player.Save(1);
    EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u);
    if (has_mixed) {
      EXPECT_EQ(schedule.OnSegment(/*scope=*/1), std::nullopt);
    }
    player.Save(7);
    EXPECT_EQ(schedule.OnSegment(/*scope=*/1), has_mixed ? 2u : 1u) << "what comes now is kept";
    EXPECT_THAT(schedule.cached(), SizeIs(has_mixed ? 0 : 1));
  }
}

TEST(PlannedSchedule, AMixIsTriedByAStepThatIsRecorded) {
  auto [schedule, player] = WithAmpleTarget({WithMix({1, 2}, {1})});
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

TEST(PlannedSchedule, StepsAreWorthRecordingUntilTheMixOfEachKindWasTried) {
  const std::vector<CachedPtr> kinds = {WithMix({1, 2}, {0}), WithMix({5, 6}, {1})};
  auto [schedule, player] = WithAmpleTarget(kinds);
  for (int turn = 0; turn < kKnownInARow; ++turn) {
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
  auto [schedule, player] = WithAmpleTarget({WithMix({1, 2}, {})});
  for (int step = 0; step < kKnownInARow; ++step) player.Play({1, 2});
  EXPECT_TRUE(schedule.WantsRecord());
  schedule.Learn(WithMix({1, 2}, {}));  // as if it ran as planned
  EXPECT_FALSE(schedule.WantsRecord());
}

TEST(PlannedSchedule, WhereAnotherKindBeginsAlikeNoMixIsTried) {
  auto [schedule, player] = WithAmpleTarget({WithMix({1, 2}, {0}), WithMix({1, 3}, {0})});
  schedule.set_is_recorded(true);
  player.Save(1);
  EXPECT_EQ(schedule.OnSegment(/*scope=*/1), 0u);
  player.EndStep();
  EXPECT_EQ(schedule.TakeSegmentLog().tried, nullptr);
}

TEST(PlannedSchedule, AKindWithAMixThatDoesNotComeIsNotWaitedForForEver) {
  PlayedSchedule played = WithAmpleTarget({WithMix({1, 2}, {0}), PlannedChain({5, 6})});
  EXPECT_EQ(PlayWhileRecorded(played, {5, 6}), PlannedSchedule::kKnownInARowForRecompute);
}

// --- A step that is not the expected one ---

TEST(PlannedSchedule, AStepGoesOnAsTheKnownOneThatBeginsLikeIt) {
  auto [schedule, player] = WithAmpleTarget(
      {PlannedChain({1, 2, 7, 3, 4}, {{.object = 1, .evict_at = 4, .fetch_at = 8}}),
       PlannedChain({1, 2, 7, 5, 6}, {{.object = 0, .evict_at = 3, .fetch_at = 8}})});
  EXPECT_THAT(player.SaveAll({1, 2, 7}), ElementsAre("stay 1", "out 0", "stay 2"));
  EXPECT_THAT(player.Save(3), ElementsAre("stay 3", "out 1"))
      << "what has stayed and moves in this one leaves";
  EXPECT_THAT(player.Save(4), ElementsAre("stay 4", "drop 1"))
      << "what has left and would have stayed is not dropped";
}

TEST(PlannedSchedule, AStepThatSavesInAnotherOrderIsWhereItsLastUseIs) {
  auto [schedule, player] =
      WithAmpleTarget({PlannedChain({3, 1, 2}, {{.object = 1, .evict_at = 2, .fetch_at = 4}}),
                       PlannedChain({1, 2, 4})});
  EXPECT_THAT(player.SaveAll({1, 2}), ElementsAre("stay 0", "stay 1"));
  EXPECT_THAT(player.Save(3), ElementsAre("stay 2", "out 0", "drop 0"));
}

TEST(PlannedSchedule, WhatWasSavedBeforeWithTheSameSignatureIsCountedInTheOtherStep) {
  auto [schedule, player] =
      WithAmpleTarget({PlannedChain({1, 1, 3}, {{.object = 1, .evict_at = 2, .fetch_at = 4}}),
                       PlannedChain({1, 1, 4})});
  EXPECT_THAT(player.SaveAll({1, 1, 3}),
              ElementsAre("stay 0", "stay 1", "stay 2", "out 1", "drop 1"));
}

TEST(PlannedSchedule, WhatWasDueInTheStepThatWasThoughtIsNotDueAnyMore) {
  auto [schedule, player] = WithAmpleTarget(
      {PlannedChain({1, 2, 3, 9}, {{.object = 0, .evict_at = 5, .fetch_at = 6}}), FourTensors()});
  player.HoldBack();
  EXPECT_THAT(player.PlayForward({1, 2, 3, 9}), ElementsAre("stay 1", "stay 2", "stay 3", "out 0"));
}

TEST(PlannedSchedule, WhatHasStayedLeavesLateOnlyOnce) {
  auto [schedule, player] =
      WithAmpleTarget({PlannedChain({1, 2, 3}, {{.object = 0, .evict_at = 3, .fetch_at = 5}}),
                       PlannedChain({1, 2, 4})});
  EXPECT_THAT(player.SaveAll({1, 2, 3}), ElementsAre("stay 0", "stay 1", "stay 2", "out 0"));
  EXPECT_THAT(player.Save(9), ElementsAre("out 1", "out 2", "drop 0", "drop 1", "drop 2"));
}

TEST(PlannedSchedule, OfSeveralThatBeginAlikeTheOneThatWasFollowedLastIsTriedFirst) {
  auto [schedule, player] =
      WithAmpleTarget({PlannedChain({1, 2, 3}),
                       PlannedChain({1, 2, 5}, {{.object = 0, .evict_at = 2, .fetch_at = 4}})});
  EXPECT_THAT(player.Save(1), IsEmpty()) << "it leaves";
  player.SaveAll({2, 3});
  player.EndStep();
  EXPECT_THAT(player.Save(1), ElementsAre("stay 0"));
}

TEST(PlannedSchedule, OfSeveralThatBeginAlikeTheOneThatCameAfterTheLastStepBeforeIsTriedFirst) {
  PlayedSchedule played = WithAmpleTarget({PlannedChain({1, 2, 3}), PlannedChain({1, 2, 5})});
  const auto begins_as = [&played](uint64_t third) {
    played.player.Save(1);
    const uint64_t found = played.schedule.followed()->step().objects[2].signature;
    played.player.SaveAll({2, third});
    played.player.EndStep();
    return found == third;
  };
  for (const uint64_t third : {3, 5, 3}) begins_as(third);
  EXPECT_TRUE(begins_as(5));
  EXPECT_TRUE(begins_as(3));
  EXPECT_FALSE(begins_as(3)) << "another one came after it";
  EXPECT_TRUE(begins_as(3));
  played.player.Save(9);
  played.player.EndStep();
  EXPECT_TRUE(begins_as(3)) << "after one that is not known, the last one that was followed";
}

TEST(PlannedSchedule, WhenAStepTurnsOutToBeUnknownWhatHasStayedLeaves) {
  auto [schedule, player] = WithAmpleTarget({FourTensors()});
  player.SaveAll({1, 2, 3});
  EXPECT_THAT(player.Save(9), ElementsAre("out 1", "out 2", "drop 1", "drop 2"));
  EXPECT_THAT(player.EndForward(), ElementsAre("out 3", "drop 3"));
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

TEST(PlannedSchedule, WhatIsComputedAgainKeepsNobodyFromComingBackAhead) {
  StepTrace step = Chain({1, 2, 3});
  step.objects[1].recast_us = 1;
  std::vector<IdleInterval> idle_intervals = IdleIntervalsOf(step);  // of the first two
  ASSERT_EQ(idle_intervals.size(), 2u);
  for (IdleInterval& idle : idle_intervals) {
    idle.offloaded_from = idle.first;
    idle.offloaded_until = idle.last;
  }
  idle_intervals[0].offloaded_until = 3;
  auto [schedule, player] = WithAmpleTarget({Planned(step, MovesOf(step, idle_intervals))});
  player.Save(1);
  EXPECT_THAT(player.Save(2, kSize, TargetPlayer::kOwnOperator, /*frees=*/true,
                          /*is_recomputed=*/true),
              ElementsAre("out 0", "drop 0"));
  EXPECT_THAT(player.PlayForward({3}), ElementsAre("stay 2"));
  EXPECT_THAT(player.Read({2, 1}), ElementsAre("fetch 0", "compute 1"));
}

// --- A step whose reads differ ---

TEST(PlannedSchedule, AStepThatReadsMoreOftenThanTheKnownOneGoesOnLikeTheFirst) {
  auto [schedule, player] = WithAmpleTarget({FourTensors()});
  player.PlayForward({1, 2, 3, 4});
  player.Read({3, 2});
  EXPECT_NE(schedule.followed(), nullptr);
  EXPECT_THAT(player.Read(3), ElementsAre("out 1", "out 2", "out 3", "drop 1", "drop 2", "drop 3",
                                          "drop 0", "demand 3"))
      << "what has stayed leaves, and what was fetched ahead goes";
  EXPECT_EQ(schedule.followed(), nullptr);
}

TEST(PlannedSchedule, AStepThatLeavesOutAReadOfWhatIsStillNeededGoesOnLikeTheFirst) {
  for (const bool is_needed : {true, false}) {
    SCOPED_TRACE(is_needed ? "still needed" : "released");
    auto [schedule, player] = WithAmpleTarget({FourTensors()});
    player.PlayForward({1, 2, 3, 4});
    if (!is_needed) player.Release(3);
    player.Read(2);  // tensor 3 was to be read first
    EXPECT_EQ(schedule.followed() == nullptr, is_needed);
  }
}

TEST(PlannedSchedule, AStepThatKeepsTheGraphThatTheKnownOneLetsGoOfGoesOnLikeTheFirst) {
  auto [schedule, player] = WithAmpleTarget({FourTensors()});
  player.PlayForward({1, 2, 3, 4});
  EXPECT_THAT(player.ReadAndKeep(3),
              ElementsAre("out 1", "out 2", "out 3", "drop 1", "drop 2", "drop 3", "demand 3"));
  EXPECT_EQ(schedule.followed(), nullptr);
}

TEST(PlannedSchedule, AStepWhoseBackwardMakesAGraphGoesOnLikeTheFirst) {
  StepTrace step = Chain({1, 2, 3});
  for (StepObject& object : step.objects) object.needed_until = 6;
  auto [schedule, player] = WithAmpleTarget({Planned(step)});
  player.PlayForward({1, 2, 3});
  player.ReadAndKeep(2);
  EXPECT_NE(schedule.followed(), nullptr);
  player.Read(1, TargetPlayer::kOwnOperator, AccessKind::kReadIntoGraph);
  EXPECT_EQ(schedule.followed(), nullptr);
}

TEST(PlannedSchedule, AStepInWhichSomethingIsNeededLongerGoesOnLikeTheFirst) {
  StepTrace step = Chain({1, 2, 3, 4});
  step.objects[3].needed_until = 5;
  auto [schedule, player] = WithAmpleTarget({Planned(step)});
  for (const bool is_released : {true, false}) {
    player.PlayForward({1, 2, 3, 4});
    player.Read(3);
    EXPECT_NE(schedule.followed(), nullptr);
    if (is_released) player.Release(3);
    player.Read(2);
    EXPECT_EQ(schedule.followed() != nullptr, is_released);
    player.EndStep();
  }
}

// Its graph is kept and read twice: uses 4 to 7, and in the same order 8 to 11.
CachedPtr FourTensorsReadTwice(std::vector<StepMove> moves) {
  StepTrace step = Chain({1, 2, 3, 4});
  for (uint32_t object = 4; object-- > 0;) {
    step.objects[object].needed_until = 12 - object;
    step.accesses.push_back(object);
  }
  step.intervals.resize(step.accesses.size() + 1);
  return Planned(std::move(step), std::move(moves));
}

TEST(PlannedSchedule, AStepGoesOnAsTheKnownOneThatReadsLikeIt) {
  const auto twice =
      FourTensorsReadTwice({{.object = 1, .evict_at = 3, .fetch_at = 6, .read_at = 6}});
  const auto once = FourTensors();
  auto [schedule, player] = WithAmpleTarget({twice, once});
  player.PlayForward({1, 2, 3, 4});
  EXPECT_EQ(schedule.followed(), once);
  EXPECT_THAT(player.ReadAndKeep(3), ElementsAre("out 1", "drop 1"));
  EXPECT_EQ(schedule.followed(), twice);
  player.EndStep();
  player.Save(1);
  EXPECT_EQ(schedule.followed(), twice) << "that was followed last";
}

TEST(PlannedSchedule, WhatIsFetchedForTheNextBackwardStaysAtTheEndOfThisOne) {
  auto [schedule, player] = WithAmpleTarget(
      {FourTensorsReadTwice({{.object = 0, .evict_at = 2, .fetch_at = 7, .read_at = 7},
                             {.object = 3, .evict_at = 5, .fetch_at = 7, .read_at = 8}})});
  player.PlayForward({1, 2, 3, 4});
  player.ReadAndKeep({3, 2, 1});
  EXPECT_THAT(player.ReadAndKeep(0), ElementsAre("demand 0", "fetch 3"));
  EXPECT_THAT(schedule.FetchedIn(TargetPlayer::kBackward), IsEmpty()) << "it reads both again";
  player.Save(9);
  EXPECT_EQ(schedule.followed(), nullptr);
  EXPECT_THAT(schedule.FetchedIn(TargetPlayer::kBackward), SizeIs(2)) << "no plan counts on them";
}

// Object 0 is fetched for the first backward and stays for the second. Object 3 leaves in between.
TEST(PlannedSchedule, WhatHasComeBackInAGraphThatIsKeptStaysUnlessThePlanDropsIt) {
  auto [schedule, player] = WithAmpleTarget(
      {FourTensorsReadTwice({{.object = 3, .evict_at = 3, .fetch_at = 4, .read_at = 4},
                             {.object = 0, .evict_at = 2, .fetch_at = 6, .read_at = 7},
                             {.object = 3, .evict_at = 5, .fetch_at = 7, .read_at = 8}})});
  player.PlayForward({1, 2, 3, 4});
  player.ReadAndKeep(3);
  EXPECT_FALSE(schedule.StaysFetched(player.parcel(3)));
  player.ReadAndKeep({2, 1, 0});
  EXPECT_TRUE(schedule.StaysFetched(player.parcel(0)));
  EXPECT_THAT(schedule.FetchedIn(TargetPlayer::kBackward), IsEmpty()) << "all are for the second";
  EXPECT_THAT(schedule.FetchedAhead(), SizeIs(2)) << "they may go where there is no room";
  player.ReadAndRelease({3, 2, 1});
  player.Read(0);
  ASSERT_NE(schedule.followed(), nullptr);
  EXPECT_FALSE(schedule.StaysFetched(player.parcel(0))) << "nobody reads it again";
}

TEST(PlannedSchedule, WhatItsReaderIsAboutToReadStaysHoweverLittleRoomThereIs) {
  auto [schedule, player] = WithTarget(
      4 * kSize,
      {FourTensorsReadTwice({{.object = 1, .evict_at = 3, .fetch_at = 5, .read_at = 6}})});
  player.PlayForward({1, 2, 3, 4});
  EXPECT_THAT(player.ReadAndKeep({3, 2}), Contains("fetch 1"));
  player.SetOtherBytes(2 * kSize);
  EXPECT_THAT(player.ReadAndKeep(1), ElementsAre("out 2", "out 3", "drop 2", "drop 3"));
  EXPECT_TRUE(schedule.StaysFetched(player.parcel(1)));
}

TEST(PlannedSchedule, WhatWasFetchedAheadGoesAgainWhereMoreIsAllocatedThanWasPlanned) {
  auto [schedule, player] = WithTarget(4 * kSize, {FourTensors()});
  player.PlayForward({1, 2, 3, 4});
  EXPECT_THAT(player.ReadAndRelease({3, 2}), Contains("fetch 0"));
  player.SetOtherBytes(3 * kSize);
  EXPECT_THAT(player.ReadAndRelease({1}), ElementsAre("drop 0"))
      << "not the one that is about to be read";
  player.SetOtherBytes(0);
  EXPECT_THAT(player.Read(0), ElementsAre("demand 0"));
}

TEST(PlannedSchedule, OfWhatWasFetchedAheadTheLastToBeReadGoesFirst) {
  auto [schedule, player] = WithTarget(
      6 * kSize, {PlannedChain({1, 2, 3, 4, 5}, {{.object = 0, .evict_at = 4, .fetch_at = 5},
                                                 {.object = 1, .evict_at = 4, .fetch_at = 5}})});
  player.PlayForward({1, 2, 3, 4, 5});
  ASSERT_THAT(player.ReadAndRelease({4, 3}), IsSupersetOf({"fetch 0", "fetch 1"}));
  player.SetOtherBytes(4 * kSize);
  EXPECT_THAT(player.Read(2), ElementsAre("drop 0"));
}

TEST(PlannedSchedule, WhatWentAgainIsFetchedAheadOnceMoreWhenThereIsRoom) {
  auto [schedule, player] = WithTarget(
      6 * kSize, {PlannedChain({1, 2, 3, 4, 5, 6}, {{.object = 0, .evict_at = 2, .fetch_at = 7}})});
  player.PlayForward({1, 2, 3, 4, 5, 6});
  EXPECT_THAT(player.ReadAndRelease({5, 4}), Contains("fetch 0"));
  player.SetOtherBytes(3 * kSize);
  EXPECT_THAT(player.ReadAndRelease({3}), ElementsAre("drop 0"));
  player.SetOtherBytes(0);
  EXPECT_THAT(player.Read(2), ElementsAre("fetch 0"));
}

TEST(PlannedSchedule, WhatNobodyReadsAnyMoreLeavesFirst) {
  StepTrace step = Chain({1, 2, 3});
  // Its first object is needed to the end, and not read.
  step.accesses.pop_back();
  step.operators.resize(step.operators.empty() ? 0 : step.accesses.size());
  step.intervals.pop_back();
  step.objects[0].needed_until = 5;
  auto [schedule, player] = WithTarget(3 * kSize, {Planned(std::move(step))});
  EXPECT_THAT(player.PlayForward({1, 2, 3}), Not(Contains("out 0")));
  player.SetOtherBytes(kSize);
  EXPECT_THAT(player.Read(2), ElementsAre("out 0", "drop 0"));
}

TEST(PlannedSchedule, StreamedWeightsGiveWayToWhatWasPlanned) {
  auto [schedule, player] =
      WithTarget(4 * kSize, {Planned(Chain({1, 2, 3, 4}), {}, /*peak_bytes=*/4 * kSize)});
  player.SetStreamedBytes(kSize);
  EXPECT_THAT(player.PlayForward({1, 2, 3, 4}),
              ElementsAre("stay 0", "stay 1", "stay 2", "stay 3"));
  player.SetOtherBytes(kSize);
  EXPECT_THAT(player.Read(3), ElementsAre("out 0", "drop 0")) << "but not to what was not";
}

// First what is used last.
TEST(PlannedSchedule, WhatHasStayedForTheNextBackwardGoesWhereMoreIsAllocatedThanWasPlanned) {
  auto [schedule, player] = WithTarget(
      4 * kSize,
      {FourTensorsReadTwice({{.object = 1, .evict_at = 3, .fetch_at = 5, .read_at = 6},
                             {.object = 0, .evict_at = 2, .fetch_at = 6, .read_at = 7}})});
  player.PlayForward({1, 2, 3, 4});
  player.ReadAndKeep({3, 2, 1, 0});
  ASSERT_TRUE(schedule.StaysFetched(player.parcel(0)));
  ASSERT_TRUE(schedule.StaysFetched(player.parcel(1)));
  player.SetOtherBytes(kSize);
  EXPECT_THAT(player.Read(3), ElementsAre("drop 0"));
  EXPECT_NE(schedule.followed(), nullptr);
  EXPECT_EQ(player.device_bytes(), 4 * kSize);
  player.Release(3);
  EXPECT_THAT(player.Read(2), IsEmpty());
}

// Its graph is not kept: what its second reader, which a branch has left out, would have read.
TEST(PlannedSchedule, WhatASecondReaderHasNotReadGoesAtTheEndOfTheBackward) {
  StepTrace step = Chain({1, 2, 3, 4});
  step.accesses.push_back(0);
  step.intervals.resize(step.accesses.size() + 1);
  auto [schedule, player] =
      WithAmpleTarget({Planned(step, {{.object = 0, .evict_at = 2, .fetch_at = 6, .read_at = 7}})});
  player.PlayForward({1, 2, 3, 4});
  player.Read({3, 2, 1, 0});
  ASSERT_NE(schedule.followed(), nullptr);
  EXPECT_THAT(schedule.FetchedIn(TargetPlayer::kBackward), SizeIs(1));
}

TEST(PlannedSchedule, WhatHasStayedForTheNextBackwardGoesWhenTheStepTurnsOutToBeUnknown) {
  auto [schedule, player] = WithAmpleTarget(
      {FourTensorsReadTwice({{.object = 0, .evict_at = 2, .fetch_at = 6, .read_at = 7}})});
  player.PlayForward({1, 2, 3, 4});
  player.ReadAndKeep({3, 2, 1, 0});
  ASSERT_TRUE(schedule.StaysFetched(player.parcel(0)));
  EXPECT_THAT(player.Save(9), Contains("drop 0"));
  ASSERT_EQ(schedule.followed(), nullptr);
  EXPECT_FALSE(schedule.StaysFetched(player.parcel(0)));
}

TEST(PlannedSchedule, OfThoseThatBeginLikeItAStepGoesOnAsOneThatFitsIntoTheTarget) {
  const auto once = FourTensors();
  StepTrace twice = FourTensorsReadTwice({})->step();
  auto [schedule, player] = WithAmpleTarget(
      {once, std::make_shared<const CachedPlan>(std::move(twice), StepPlan(),
                                                absl::ResourceExhaustedError("too little"))});
  player.SaveAll({1, 2, 3, 4});
  EXPECT_EQ(schedule.followed(), once);
}

// --- The plan cache ---

TEST(PlannedSchedule, StepsThatSaveTheSameAndReadOrFreeItOtherwiseAreKeptSideBySide) {
  StepTrace kept = Chain({1, 2, 3, 4}), in_order = kept, frees_others = kept;
  kept.objects[3].needed_until = 8;
  in_order.accesses = {0, 1, 2, 3, 0, 1, 2, 3};
  frees_others.objects[1].frees = false;
  auto [schedule, player] = WithAmpleTarget();
  size_t plans = 0;
  for (const CachedPtr& cached : {FourTensors(), FourTensorsReadTwice({}), Planned(kept),
                                  Planned(in_order), Planned(frees_others)}) {
    schedule.Learn(cached);
    EXPECT_THAT(schedule.cached(), SizeIs(++plans));
  }
}

TEST(PlannedSchedule, TheStepsThatWereFollowedLastAreKept) {
  auto [schedule, player] = WithAmpleTarget();
  for (uint64_t signature = 1; signature <= PlannedSchedule::kMaxCached; ++signature) {
    schedule.Learn(PlannedChain({signature}));
  }
  player.Play({1});
  EXPECT_EQ(FirstSignatures(schedule).front(), 1u);
  schedule.Learn(PlannedChain({1000}));
  const std::vector<uint64_t> kept = FirstSignatures(schedule);
  EXPECT_THAT(kept, SizeIs(PlannedSchedule::kMaxCached));
  EXPECT_EQ(kept[0], 1000u);
  EXPECT_EQ(kept[1], 1u);
  EXPECT_EQ(kept.back(), 3u) << "2 is forgotten";
}

TEST(PlannedSchedule, AStepThatSavesAndReadsTheSameTakesThePlaceOfTheOneBefore) {
  const CachedPtr again = PlannedChain({1, 2, 3, 4});
  auto [schedule, player] = WithAmpleTarget({FourTensors(), PlannedChain({1, 2}), again});
  EXPECT_THAT(schedule.cached(), SizeIs(2));
  EXPECT_TRUE(schedule.cached().front()->IsLike(again->step()));
}

// --- Planning ---

TEST(PlannedSchedule, APlanKeepsWithinTheTarget) {
  const PlannedSchedule schedule(Within(3 * kSize));
  const CachedPtr cached = schedule.Plan(Chain({1, 2, 3, 4})).value();
  EXPECT_EQ(cached->plan().peak_bytes, 3 * kSize);
  EXPECT_THAT(cached->shortfall(), IsOk());
}

TEST(PlannedSchedule, WhereTheTargetCannotBeMetThePlanIsTheLeastAndSaysWhy) {
  const PlannedSchedule schedule(Within(kSize));
  const StepTrace step = Chain({1, 2, 3, 4});
  const CachedPtr cached = schedule.Plan(step).value();
  EXPECT_EQ(cached->plan().peak_bytes, LeastMemoryBytes(step).value());
  EXPECT_THAT(cached->shortfall(),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("does not fit")));
}

TEST(PlannedSchedule, OfATargetIsReservedAsMuchAsIsEnoughIfTheStepLeavesIt) {
  const StepTrace step = Chain({1, 2, 3, 4});
  const uint64_t least_bytes = LeastMemoryBytes(step).value();
  const Reservation reservation = {.least_bytes = kSize, .enough_bytes = 2 * kSize};
  // Room for `enough_bytes` and two objects, for `enough_bytes`, and for more than `least_bytes`.
  for (const uint64_t beside_bytes : {4 * kSize, 2 * kSize, kSize + kSize / 2}) {
    const PlannedSchedule schedule(Within(least_bytes + beside_bytes));
    const auto cached = schedule.Plan(step, /*mixes=*/false, reservation).value();
    EXPECT_THAT(cached->shortfall(), IsOk());
    const uint64_t reserved_bytes = std::min(beside_bytes, reservation.enough_bytes);
    EXPECT_LE(cached->plan().peak_bytes, least_bytes + beside_bytes - reserved_bytes);
    EXPECT_GT(cached->plan().peak_bytes, least_bytes + beside_bytes - reserved_bytes - kSize);
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

TEST(PlannedSchedule, WhatIsReservedIsPartOfTheLeastThatIsTold) {
  const StepTrace step = Chain({1, 2, 3, 4});
  const uint64_t least_bytes = LeastMemoryBytes(step).value();
  const PlannedSchedule schedule(Within(least_bytes + kSize - 1));
  const auto cached =
      schedule.Plan(step, /*mixes=*/false, {.least_bytes = kSize, .enough_bytes = 2 * kSize})
          .value();
  EXPECT_THAT(cached->shortfall().message(),
              HasSubstr(absl::StrCat("target's least is ", least_bytes + kSize)));
}

TEST(PlannedSchedule, AStepThatRunsAsPlannedIsBoundByItsPeakUntilItIsAnotherOne) {
  for (const bool moves : {true, false}) {
    auto [schedule, player] = PlayedSchedule(Within(moves ? 3 * kSize : 100 * kSize));
    EXPECT_FALSE(schedule.StepPeakBound().has_value());
    schedule.Learn(schedule.Plan(Chain({1, 2, 3, 4})).value());
    EXPECT_FALSE(schedule.StepPeakBound().has_value()) << "no step runs";
    player.Save(1);
    ASSERT_TRUE(schedule.StepPeakBound().has_value());
    EXPECT_EQ(schedule.StepPeakBound()->most_bytes, schedule.followed()->plan().peak_bytes);
    EXPECT_EQ(schedule.StepPeakBound()->moves, moves);
    player.Save(7);
    EXPECT_FALSE(schedule.StepPeakBound().has_value()) << "this is another step";
  }
}

TEST(PlannedSchedule, WhatAStepBeginsWithBeyondItsRecordIsInTheBoundAsWell) {
  auto [schedule, player] = WithAmpleTarget({PlannedChain({1, 2})});
  schedule.OnDeviceBytes(5 * kSize, /*streamed_bytes=*/kSize);
  player.Save(1);
  EXPECT_EQ(MoreBytes(schedule), 3 * kSize) << "the record begins with the first tensor alone";
}

TEST(PlannedSchedule, AStepThatMayStillBeAnotherIsBoundByAndLeavesRoomForTheLargerOne) {
  for (const bool larger_is_followed : {true, false}) {
    SCOPED_TRACE(larger_is_followed);
    StepTrace large = Chain({1, 2, 3});
    large.intervals[1].transient_bytes = large.intervals[2].transient_bytes = 4 * kSize;
    const CachedPtr larger =
        Planned(std::move(large), {{.object = 0, .evict_at = 2, .read_at = 5}}, 9 * kSize);
    const CachedPtr smaller = Planned(Chain({1, 2, 7}), {}, 3 * kSize);
    std::vector<CachedPtr> known = {larger, smaller};
    if (larger_is_followed) std::swap(known[0], known[1]);
    auto [schedule, player] = WithTarget(6 * kSize, known);
    // Beside the followed plan the larger one's growth does not fit.
    const uint64_t device_bytes = larger_is_followed ? 9 * kSize : 4 * kSize;
    const auto expect_larger = [&schedule = schedule, device_bytes] {
      EXPECT_EQ(schedule.StepPeakBound()->most_bytes, 9 * kSize);
      EXPECT_TRUE(schedule.StepPeakBound()->moves);
      schedule.OnDeviceBytes(device_bytes, 0);
      EXPECT_TRUE(schedule.LacksBytes());
    };
    player.Save(1);
    expect_larger();
    player.Save(2);
    expect_larger();
    player.Save(7);
    EXPECT_EQ(schedule.StepPeakBound()->most_bytes, 3 * kSize) << "it is the smaller one";
    EXPECT_FALSE(schedule.StepPeakBound()->moves);
    schedule.OnDeviceBytes(4 * kSize, 0);
    EXPECT_FALSE(schedule.LacksBytes());
  }
}

TEST(PlannedSchedule, AStepThatLeavesOutWhatAnotherPlanDoesNotHaveFollowsThatOne) {
  auto [schedule, player] = WithAmpleTarget({PlannedChain({1, 2, 4}), PlannedChain({1, 2, 3, 4})});
  player.SaveAll({1, 2});
  ASSERT_THAT(schedule.followed()->step().objects, SizeIs(4));
  player.Save(4);
  EXPECT_THAT(schedule.followed()->step().objects, SizeIs(3));
}

TEST(PlannedSchedule, WhatShouldHaveGoneIsInTheBoundBesideThePeakUntilItLeavesAndThenGoesAtOnce) {
  auto [schedule, player] = WithAmpleTarget({FourTensors()});
  player.HoldBack();
  player.SaveAll({1, 2});
  EXPECT_EQ(MoreBytes(schedule), 0u);
  for (const uint64_t signature : {3, 4}) {
    player.Save(signature);
    EXPECT_EQ(MoreBytes(schedule), kSize) << "from the third one on tensor 0 should be offloaded";
  }
  EXPECT_THAT(player.EndForward(), ElementsAre("out 0", "drop 0"));
  EXPECT_EQ(MoreBytes(schedule), 0u);
}

TEST(PlannedSchedule, WhatNeverLeavesIsInTheBoundBesideThePeakUntilItIsToBeBack) {
  for (const bool is_let_go : {false, true}) {
    auto [schedule, player] = WithAmpleTarget({FourTensors()});
    player.HoldBack();
    player.SaveAll({1, 2, 3, 4});
    EXPECT_EQ(MoreBytes(schedule), kSize);
    if (is_let_go) {
      player.Release(0);
    } else {
      schedule.OnUsed(3, AccessKind::kRead);
      schedule.OnUsed(2, AccessKind::kRead);
      schedule.TakeFetches({1, 3}, /*backward=*/5, [](const ScheduledParcel&) { return true; });
    }
    EXPECT_EQ(MoreBytes(schedule), 0u);
  }
}

TEST(PlannedSchedule, WhatGoesWhileOthersHoldItIsInTheBoundBesideThePeakUntilItIsReleased) {
  StepTrace step = FourTensors()->step();
  for (const bool frees : {true, false}) {
    SCOPED_TRACE(frees ? "frees its memory" : "frees nothing");
    step.objects[0].frees = frees;
    auto [schedule, player] = WithAmpleTarget({Planned(step, FourTensors()->plan().moves)});
    player.SaveAll({1, 2});
    player.Hold(0);
    EXPECT_EQ(MoreBytes(schedule), 0u);
    EXPECT_THAT(player.Save(3), Contains("drop 0"));
    EXPECT_EQ(MoreBytes(schedule), frees ? kSize : 0)
        << "what freed nothing where it was recorded is among the other bytes";
    player.Release(0);
    EXPECT_EQ(MoreBytes(schedule), 0u);
  }
}

TEST(PlannedSchedule, WhatOthersHoldIsInTheBoundByTheKnownStepThatFollowsAsWell) {
  const CachedPtr cached = FourTensors();
  auto [schedule, player] =
      WithAmpleTarget({cached, Planned(Chain({1, 2, 3, 9}), cached->plan().moves)});
  player.Save(1);
  player.Hold(0);
  player.SaveAll({2, 3});
  ASSERT_NE(schedule.followed(), cached);
  EXPECT_EQ(MoreBytes(schedule), kSize);
  player.Save(4);
  ASSERT_EQ(schedule.followed(), cached);
  EXPECT_EQ(MoreBytes(schedule), kSize);
}

TEST(PlannedSchedule, WhatOthersHoldIsInTheBoundEachTimeThatItIsToBeAway) {
  auto [schedule, player] = WithAmpleTarget({FourTensorsOfWhichOneGoesTwice()});
  player.Save(1);
  player.Hold(0);
  player.PlayForward({2, 3, 4});
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
  auto [schedule, player] = WithAmpleTarget({FourTensorsOfWhichOneGoesTwice()});
  player.Save(1);
  player.Hold(0);
  player.PlayForward({2, 3, 4});
  player.LetGo(0);
  EXPECT_THAT(player.Read({3, 2, 0, 1}), ElementsAre("fetch 0", "drop 0"));
  EXPECT_EQ(MoreBytes(schedule), 0u);
}

// The plan counts it as there.
TEST(PlannedSchedule, WhatGoesEarlyWhileOthersHoldItIsInTheBoundOnceItIsToBeAway) {
  auto [schedule, player] = WithTarget(
      4 * kSize, {PlannedChain({1, 2, 3, 4, 5}, {{.object = 0, .evict_at = 4, .fetch_at = 7}})});
  player.Save(1);
  player.Hold(0);
  player.Save(2);
  player.SetOtherBytes(kSize + 1);
  EXPECT_THAT(player.Save(3), Contains("drop 0"));
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
  auto [schedule, player] = PlayedSchedule(Auto());
  EXPECT_FALSE(schedule.AsksForDeviceBytes());
  EXPECT_THAT(player.PlayForward({1, 2, 3, 4}),
              ElementsAre("out 0", "out 1", "out 2", "drop 0", "out 3", "drop 1"));
  EXPECT_THAT(player.Read(3), ElementsAre("fetch 1"));
}

TEST(PlannedSchedule, WithoutATargetWhatWasDroppedToMakeRoomIsFetchedAheadOnceMore) {
  auto [schedule, player] = PlayedSchedule(Auto());
  player.PlayForward({1, 2, 3, 4});
  ASSERT_THAT(player.Read(3), Contains("fetch 1"));
  player.WantRoom();
  EXPECT_THAT(player.Read(2), Contains("fetch 1"));
}

TEST(PlannedSchedule, WithoutATargetAKnownStepRunsByItsPlan) {
  auto [schedule, player] = PlayedSchedule(Auto(), {FourTensors()});
  player.SetOtherBytes(1000 * kSize);
  EXPECT_THAT(player.Play({1, 2, 3, 4}),
              ElementsAre("stay 1", "out 0", "stay 2", "drop 0", "stay 3", "fetch 0"));
}

TEST(PlannedSchedule, InAKnownStepNothingWaitsForABatch) {
  TargetOptions options = Auto();
  options.windows.full_batch_bytes = kSize;
  auto [schedule, player] = PlayedSchedule(options, {FourTensors()});
  EXPECT_GT(schedule.BatchBytes(), 0u);
  EXPECT_GT(schedule.LateBytes(), 0u);
  player.Save(1);
  EXPECT_EQ(schedule.BatchBytes(), 0u);
  EXPECT_EQ(schedule.LateBytes(), 0u);
}

TEST(PlannedSchedule, WithoutATargetThePlanIsNoSlowerThanItsCompute) {
  StepTrace step = Chain({1, 2, 3, 4});
  for (StepInterval& interval : step.intervals) interval.compute_us = 1;
  const PlannedSchedule schedule(Auto());
  const CachedPtr cached = schedule.Plan(step).value();
  EXPECT_LE(cached->plan().step_us, kMaxSlowdown * step.compute_us());
  EXPECT_LT(cached->plan().peak_bytes, 4 * kSize);
}

}  // namespace planned_schedule_test
}  // namespace pinion::testing
