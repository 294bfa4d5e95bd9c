#include "pinion/engine/planner/liveness.h"

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Objects that are used in this order.
StepRecord Uses(const std::vector<uint32_t>& uses) {
  StepRecord step;
  step.uses = uses;
  for (const uint32_t object : uses) {
    if (object == step.objects.size()) step.objects.push_back({.size_bytes = 1});
  }
  step.stretches.resize(uses.size() + 1);
  return step;
}

TEST(StepLives, AnObjectLivesFromTheStretchThatMakesItToTheOneBehindItsLastRead) {
  const std::vector<ObjectLife> lives = LivesOf(Uses({0, 1, 2, 1, 0}));
  EXPECT_EQ(lives[1].made, 1u);
  EXPECT_EQ(lives[1].over, 4u);
  EXPECT_TRUE(lives[1].is_read);
}

TEST(StepLives, AnObjectIsInUseWhereItIsMadeAndBehindEachLaterUse) {
  EXPECT_THAT(LivesOf(Uses({0, 1, 0, 1, 0}))[0].in_use, ElementsAre(0, 3, 5));
}

TEST(StepLives, AnObjectIsInUseUntilItIsSavedForTheLastTime) {
  StepRecord step = Uses({0, 1, 2, 0, 2, 1, 0});
  step.objects[0].saved_until = 3;
  EXPECT_THAT(LivesOf(step)[0].in_use, ElementsAre(0, 1, 2, 3, 4, 7));
}

TEST(StepLives, AnObjectIsInUseUntilTheProgramLetsGoOfIt) {
  StepRecord step = Uses({0, 1, 2, 1, 2, 1, 0});
  step.objects[0].held_until = 2;
  step.objects[1].held_until = 4;
  EXPECT_THAT(LivesOf(step)[0].in_use, ElementsAre(0, 1, 2, 7));
  EXPECT_THAT(LivesOf(step)[1].in_use, ElementsAre(1, 2, 3, 4, 6)) << "it is read meanwhile";
  step.objects[1].held_until = 100;
  EXPECT_THAT(LivesOf(step)[1].in_use, ElementsAre(1, 2, 3, 4, 5, 6)) << "longer than anybody asks";
}

TEST(StepLives, WhatIsNeverReadLivesToTheEndOfTheStep) {
  const std::vector<ObjectLife> lives = LivesOf(Uses({0, 1, 1}));
  EXPECT_EQ(lives[0].made, 0u);
  EXPECT_EQ(lives[0].over, 3u);
  EXPECT_FALSE(lives[0].is_read);
}

TEST(StepLives, WhatAnOperatorSavesCanLeaveWhenAnotherOneUsesSomething) {
  StepRecord step = Uses({0, 1, 2, 3, 3, 2, 1, 0});
  step.operators = {1, 1, 2, 3, 4, 5, 6, 6};
  EXPECT_THAT(LeavesFrom(step), ElementsAre(2, 2, 3, 4));
  step = Uses({0, 1, 0, 2, 2, 1, 0, 0});
  step.objects[0].saved_until = 2;
  EXPECT_THAT(LeavesFrom(step), ElementsAre(1, 2, 4)) << "use 2 makes nothing";
}

TEST(StepLives, WhatIsSavedOnceMoreBeforeItCanLeaveWaitsForThatOperatorToo) {
  StepRecord step = Uses({0, 0, 1, 2, 2, 1, 0, 0});
  step.operators = {1, 2, 2, 3, 4, 5, 6, 7};
  step.objects[0].saved_until = 1;
  EXPECT_THAT(LeavesFrom(step), ElementsAre(3, 3, 4)) << "object 1 is made by the second one";
  step.uses = {0, 1, 0, 2, 2, 1, 0, 0};
  step.objects[0].saved_until = 2;
  EXPECT_THAT(LeavesFrom(step), ElementsAre(1, 3, 4)) << "it has left by the time";
}

TEST(StepLives, WithoutOperatorsEachUseEndsItsOwn) {
  EXPECT_THAT(OperatorEnds(Uses({0, 1, 1, 0})), ElementsAre(0, 1, 2, 3));
}

TEST(StepLives, NeighboursOfOneNumberEndWithTheLastOfThem) {
  StepRecord step = Uses({0, 1, 2, 2, 1, 0});
  step.operators = {7, 7, 8, 3, 3, 3};
  EXPECT_THAT(OperatorEnds(step), ElementsAre(1, 1, 2, 5, 5, 5));
}

TEST(StepLives, ANumberThatComesAgainLaterIsAnotherOperators) {
  StepRecord step = Uses({0, 1, 1, 0});
  step.operators = {5, 6, 5, 5};
  EXPECT_THAT(OperatorEnds(step), ElementsAre(0, 1, 3, 3));
}

TEST(StepLives, AStepWithoutObjectsHasNeither) {
  EXPECT_THAT(LivesOf(Uses({})), IsEmpty());
  EXPECT_THAT(OperatorEnds(Uses({})), IsEmpty());
}

}  // namespace
}  // namespace pinion
