#include "pinion/bench/offload/offline_plan.h"

#include <cstdint>
#include <random>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "pinion/engine/planner/plan_step.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_simulation.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/tests/engine/planner/every_plan.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

// For every memory from the least to all.
void ExpectBestOfEveryPlan(const StepTrace& step) {
  const uint64_t all_bytes = CountedPeak(step, {});
  for (uint64_t memory = LeastMemoryBytes(step).value(); memory <= all_bytes; memory += 1000) {
    SCOPED_TRACE(memory);
    const StepPlan plan = SearchPlan(step, memory, SmallLink(), {.tries = 5000}).value();
    EXPECT_LE(CountedPeak(step, plan.moves), memory);
    EXPECT_EQ(CountedPeak(step, plan.moves), plan.peak_bytes);
    EXPECT_EQ(SimulateStep(step, plan.moves, SmallLink()).value().step_us, plan.step_us);
    const double best_us = BestOfEveryPlan(step, memory).step_us;
    EXPECT_NEAR(plan.step_us, best_us, 1e-6 * best_us);
  }
}

TEST(OfflinePlan, OfSmallForwardsAndBackwardsItIsTheBestOfEveryPlan) {
  std::mt19937 random(1);
  for (int i = 0; i < 20; ++i) {
    SCOPED_TRACE(i);
    ExpectBestOfEveryPlan(RandomChain(random, 4, /*equal_sizes=*/false));
  }
}

TEST(OfflinePlan, InAnyOrderOfUsesItIsTheBestOfEveryPlan) {
  std::mt19937 random(2);
  for (int i = 0; i < 60; ++i) {
    SCOPED_TRACE(i);
    ExpectBestOfEveryPlan(RandomOrder(random));
  }
}

TEST(OfflinePlan, WhatIsSavedAgainStaysUntilThen) {
  std::mt19937 random(3);
  StepTrace step = RandomChain(random, 4, /*equal_sizes=*/true);
  step.accesses = {0, 1, 2, 0, 3, 3, 2, 1, 0};
  step.intervals.assign(10, {.compute_us = 1});
  step.objects[0].saved_until = 3;
  const uint64_t least_bytes = LeastMemoryBytes(step).value();
  const StepPlan plan = SearchPlan(step, least_bytes, SmallLink(), {}).value();
  for (const StepMove& move : plan.moves) {
    EXPECT_TRUE(move.object != 0 || move.evict_at >= 4) << move.evict_at;
  }
}

TEST(OfflinePlan, TheSameSeedFindsTheSamePlan) {
  std::mt19937 random(4);
  const StepTrace step = RandomChain(random, 30, /*equal_sizes=*/false);
  const uint64_t memory = LeastMemoryBytes(step).value() * 3 / 2;
  const StepPlan plan = SearchPlan(step, memory, SmallLink(), {}).value();
  EXPECT_EQ(plan.moves, SearchPlan(step, memory, SmallLink(), {}).value().moves);
  EXPECT_LE(plan.step_us, PlanStep(step, memory, SmallLink())->step_us);
}

TEST(OfflinePlan, AMemoryThatIsTooSmallIsAnError) {
  std::mt19937 random(5);
  EXPECT_THAT(SearchPlan(RandomChain(random, 4, true), 1, SmallLink(), {}),
              StatusIs(absl::StatusCode::kResourceExhausted));
}

}  // namespace
}  // namespace pinion::testing
