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
StepTrace Uses(const std::vector<uint32_t>& accesses) {
  StepTrace step;
  step.accesses = accesses;
  for (const uint32_t object : accesses) {
    if (object == step.objects.size()) step.objects.push_back({.size_bytes = 1});
  }
  step.intervals.resize(accesses.size() + 1);
  return step;
}

TEST(Liveness, TheFirstAccessMakesAnObjectAndLaterOnesReadIt) {
  const std::vector<ObjectLiveness> lives = LivenessOf(Uses({0, 1, 2, 1, 2}));
  EXPECT_THAT(lives[1].accesses, ElementsAre(1, 3));
  EXPECT_EQ(lives[1].made(), 1u);
  EXPECT_TRUE(lives[1].is_read());
  EXPECT_EQ(lives[0].made(), 0u);
  EXPECT_FALSE(lives[0].is_read());
}

TEST(Liveness, WhatAnOperatorSavesCanBeOffloadedWhenAnotherOneAccessesSomething) {
  StepTrace step = Uses({0, 1, 2, 3, 3, 2, 1, 0});
  step.operators = {1, 1, 2, 3, 4, 5, 6, 6};
  EXPECT_THAT(EarliestOffloads(step), ElementsAre(2, 2, 3, 4));
  step = Uses({0, 1, 0, 2, 2, 1, 0, 0});
  step.objects[0].saved_until = 2;
  EXPECT_THAT(EarliestOffloads(step), ElementsAre(1, 2, 4)) << "access 2 makes nothing";
}

TEST(Liveness, WhatIsSavedOnceMoreBeforeItCanBeOffloadedWaitsForThatOperatorToo) {
  StepTrace step = Uses({0, 0, 1, 2, 2, 1, 0, 0});
  step.operators = {1, 2, 2, 3, 4, 5, 6, 7};
  step.objects[0].saved_until = 1;
  EXPECT_THAT(EarliestOffloads(step), ElementsAre(3, 3, 4)) << "object 1 is made by the second one";
  step.accesses = {0, 1, 0, 2, 2, 1, 0, 0};
  step.objects[0].saved_until = 2;
  EXPECT_THAT(EarliestOffloads(step), ElementsAre(1, 3, 4)) << "it has left by the time";
}

TEST(Liveness, AnOperatorEndsWithTheLastOfTheNeighboursOfItsNumber) {
  StepTrace step = Uses({0, 1, 2, 2, 1, 0});
  EXPECT_THAT(OperatorEnds(step), ElementsAre(0, 1, 2, 3, 4, 5)) << "each use has its own";
  step.operators = {7, 7, 8, 3, 3, 3};
  EXPECT_THAT(OperatorEnds(step), ElementsAre(1, 1, 2, 5, 5, 5));
  step.operators = {5, 6, 5, 5, 6, 6};
  EXPECT_THAT(OperatorEnds(step), ElementsAre(0, 1, 3, 3, 5, 5)) << "5 and 6 come again";
}

TEST(Liveness, AStepWithoutObjectsHasNeither) {
  EXPECT_THAT(LivenessOf(Uses({})), IsEmpty());
  EXPECT_THAT(OperatorEnds(Uses({})), IsEmpty());
}

}  // namespace
}  // namespace pinion
