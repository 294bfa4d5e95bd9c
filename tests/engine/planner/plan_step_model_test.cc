// Compares the planner with every plan of small steps. The enumerated plans copy objects out in the
// order of their creation. The planner may use better orders, but finds none for these steps.

#include <algorithm>
#include <cstdint>
#include <random>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "pinion/engine/planner/plan_step.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_simulation.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/tests/engine/planner/every_plan.h"
#include "pinion/tests/support/sanitizers.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

// Step times relative to the best plan, for several steps and every memory target.
struct TimesOverBest {
  int plans = 0;
  double sum = 0;
  double worst = 0;

  double mean() const { return sum / plans; }

  void Add(const StepTrace& step) {
    const uint64_t all_bytes = CountedPeak(step, {});
    EXPECT_EQ(PlanStep(step, uint64_t{1} << 40, SmallLink()).value().peak_bytes, all_bytes);
    const uint64_t least_bytes = LeastMemoryBytes(step).value();
    EXPECT_EQ(least_bytes, BestOfEveryPlan(step, 0).least_bytes);
    for (uint64_t memory = least_bytes; memory <= all_bytes; memory += 1000) {
      const absl::StatusOr<StepPlan> plan = PlanStep(step, memory, SmallLink());
      ASSERT_THAT(plan, IsOk());
      EXPECT_LE(CountedPeak(step, plan->moves), memory);
      EXPECT_EQ(CountedPeak(step, plan->moves), plan->peak_bytes);
      EXPECT_EQ(SimulateStep(step, plan->moves, SmallLink()).value().step_us, plan->step_us);
      const double best_us = BestOfEveryPlan(step, memory).step_us;
      EXPECT_GE(plan->step_us, best_us - 1e-6);
      const double ratio = best_us > 0 ? plan->step_us / best_us : 1;
      ++plans;
      sum += ratio;
      worst = std::max(worst, ratio);
    }
    if (least_bytes == 0) return;
    EXPECT_THAT(PlanStep(step, least_bytes - 1, SmallLink()),
                StatusIs(absl::StatusCode::kResourceExhausted));
  }
};

// Compares the plans of as many steps.
TimesOverBest TimesOf(int rounds, uint32_t seed, StepTrace (*draw)(std::mt19937&)) {
  std::mt19937 random(seed);
  TimesOverBest times;
  for (int i = 0; i < RoundsWithoutThreads(rounds); ++i) {
    SCOPED_TRACE(i);
    times.Add(draw(random));
  }
  return times;
}

TEST(StepPlanModel, OfEqualObjectsThePlanIsTheBestThereIs) {
  const TimesOverBest times = TimesOf(40, /*seed=*/1, [](std::mt19937& random) {
    return RandomChain(random, 4, /*equal_sizes=*/true);
  });
  EXPECT_LE(times.worst, 1 + 1e-9) << times.plans << " plans";
}

TEST(StepPlanModel, OfObjectsOfAnySizeThePlanIsCloseToTheBest) {
  const TimesOverBest times = TimesOf(60, /*seed=*/2, [](std::mt19937& random) {
    return RandomChain(random, 4, /*equal_sizes=*/false);
  });
  EXPECT_LE(times.mean(), 1.003) << times.plans << " plans, worst " << times.worst;
}

TEST(StepPlanModel, InAnyOrderOfAccessesThePlanKeepsWithinItsMemory) {
  const TimesOverBest times = TimesOf(300, /*seed=*/3, RandomOrder);
  EXPECT_LE(times.mean(), 1.005) << times.plans << " plans, worst " << times.worst;
}

}  // namespace
}  // namespace pinion::testing
