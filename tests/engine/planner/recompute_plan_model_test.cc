// RecomputePlan against the best of all sets of segments.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "absl/functional/function_ref.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/planner/liveness.h"
#include "pinion/engine/planner/plan_step.h"
#include "pinion/engine/planner/recomputation.h"
#include "pinion/engine/planner/recompute_plan.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/tests/engine/planner/every_plan.h"
#include "pinion/tests/engine/planner/small_steps.h"
#include "pinion/tests/support/sanitizers.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

// Over the best mix, which is the best of every set of segments with every plan of what is left.
struct MixesOverBest {
  int plans = 0;
  int with_recompute = 0;  // that compute something again
  int shorter = 0;         // whose best is shorter by a tenth than the best without
  double sum = 0;
  double worst = 0;  // where the plan without is within 2 % of the best without

  double mean() const { return sum / plans; }

  // Of one step, for every memory from the least to all.
  void Add(const StepTrace& step) {
    const uint64_t most_bytes = CountedPeak(step, {});
    for (uint64_t memory = LeastMemoryBytes(step).value(); memory <= most_bytes; memory += 1000) {
      SCOPED_TRACE(::testing::Message() << "memory " << memory);
      double best_us = std::numeric_limits<double>::infinity();
      const std::vector<uint32_t> all = RecomputableSegments(step);
      for (uint32_t set = 0; set < 1u << all.size(); ++set) {
        std::vector<uint32_t> segments;
        bool is_nested = false;  // a part beside the whole
        for (uint32_t i = 0; i < all.size(); ++i) {
          if ((set >> i & 1) == 0) continue;
          for (const uint32_t outer : segments) {
            is_nested = is_nested || IsInside(step.segments, all[i], outer);
          }
          segments.push_back(all[i]);
        }
        if (is_nested) continue;
        const StepTrace with = WithRecomputation(step, segments);
        ASSERT_THAT(with.Validate(), IsOk());
        best_us = std::min(best_us, BestOfEveryPlan(with, memory).step_us);
      }
      const RecomputePlan recompute = PlanWithRecomputation(step, memory, SmallLink()).value();
      const double plain_us = PlanStep(step, memory, SmallLink()).value().step_us;
      const double best_plain_us = BestOfEveryPlan(step, memory).step_us;
      EXPECT_LE(recompute.plan.step_us, plain_us);
      EXPECT_LE(CountedPeak(recompute.step, recompute.plan.moves), memory);
      EXPECT_GE(recompute.plan.step_us, best_us - 1e-6);
      const double ratio = best_us > 0 ? recompute.plan.step_us / best_us : 1;
      ++plans;
      sum += ratio;
      if (plain_us <= 1.02 * best_plain_us) worst = std::max(worst, ratio);
      with_recompute += recompute.segments.empty() ? 0 : 1;
      shorter += best_us < 0.9 * best_plain_us ? 1 : 0;
    }
  }
};

uint64_t Draw(std::mt19937& random, int from, int to) {
  return static_cast<uint64_t>(std::uniform_int_distribution<int>(from, to)(random));
}

void DrawIntervals(std::mt19937& random, StepTrace& step) {
  for (StepInterval& interval : step.intervals) {
    interval.compute_us = static_cast<double>(Draw(random, 0, 4));
    interval.other_bytes = 1000 * Draw(random, 0, 2);
  }
  // Each begins in the middle of its first interval.
  for (StepSegment& segment : step.segments) {
    StepInterval before = step.intervals[segment.accesses.front()];
    before.compute_us /= 2;
    segment.before = before;
  }
}

// Adds as many steps of `draw`, with random intervals.
MixesOverBest MixesOf(int rounds, absl::FunctionRef<StepTrace(int round, std::mt19937&)> draw) {
  std::mt19937 random(1);
  MixesOverBest sets;
  for (int round = 0; round < RoundsWithoutThreads(rounds); ++round) {
    SCOPED_TRACE(::testing::Message() << "round " << round);
    StepTrace step = draw(round, random);
    DrawIntervals(random, step);
    sets.Add(step);
  }
  EXPECT_LE(sets.worst, 1.02) << sets.plans << " plans";
  EXPECT_GT(sets.shorter, sets.plans / 10);
  return sets;
}

// Each is a segment, whose input is no object.
StepTrace FourTensors(const std::vector<uint64_t>& sizes) {
  std::vector<StepObject> objects;
  for (const uint64_t size : sizes) objects.push_back({.size_bytes = size});
  StepTrace step = ForwardAndBackward(objects);
  for (uint32_t i = 0; i < 4; ++i) step.segments.push_back({.accesses = {i, 7 - i}, .inputs = {}});
  return step;
}

TEST(RecomputePlanModel, OfBlocksThatAreAlikeTheMixIsTheBestThereIs) {
  const MixesOverBest sets = MixesOf(40, [](int round, std::mt19937& random) {
    const uint64_t input = 1000 * Draw(random, 1, 2);
    const uint64_t inner = 1000 * Draw(random, 1, 4);
    return round % 2 == 0 ? Blocks({{input, inner}, {input, inner}})
                          : FourTensors({inner, inner, inner, inner});
  });
  EXPECT_LE(sets.mean(), 1.001);
  EXPECT_GE(sets.with_recompute, sets.shorter);
}

TEST(RecomputePlanModel, OfBlocksOfAnySizeTheMixIsCloseToTheBest) {
  const MixesOverBest sets = MixesOf(40, [](int round, std::mt19937& random) {
    std::vector<uint64_t> sizes;
    for (int i = 0; i < 4; ++i) sizes.push_back(1000 * Draw(random, 1, 4));
    return round % 2 == 0 ? Blocks({{sizes[0], sizes[1]}, {sizes[2], sizes[3]}})
                          : FourTensors(sizes);
  });
  EXPECT_LE(sets.mean(), 1.003);
}

TEST(RecomputePlanModel, OfABlockInPartsTheMixIsCloseToTheBest) {
  const MixesOverBest sets = MixesOf(20, [](int, std::mt19937& random) {
    std::vector<uint64_t> sizes = {1000};
    for (int i = 0; i < 3; ++i) sizes.push_back(1000 * Draw(random, 1, 4));
    return BlocksOfParts({sizes});
  });
  EXPECT_LE(sets.mean(), 1.003);
}

// More sets than can be tried.
TEST(RecomputePlanModel, OfManyBlocksSomeAreComputedAgainAndTheStepIsShorterThanWithAllOrNone) {
  std::vector<std::vector<uint64_t>> sizes(24, {100, 2000, 2000, 2000});
  StepTrace step = Blocks(sizes);
  const uint64_t least_bytes = LeastMemoryBytes(step).value();
  const uint64_t all_bytes = PlanStep(step, uint64_t{1} << 40, RoundLink()).value().peak_bytes;
  // The link carries 10'000 bytes while an interval computes: too little for a block's 6'000, since
  // each of its intervals takes 1 us.
  for (StepInterval& interval : step.intervals) interval.compute_us = 1;
  std::vector<uint32_t> all;
  for (uint32_t i = 0; i < step.segments.size(); ++i) all.push_back(i);
  for (const uint64_t part : {4, 8, 16}) {
    const uint64_t memory = least_bytes + (all_bytes - least_bytes) / part;
    SCOPED_TRACE(part);
    const RecomputePlan recompute = PlanWithRecomputation(step, memory, RoundLink()).value();
    const double without_us = PlanStep(step, memory, RoundLink()).value().step_us;
    const double all_us =
        PlanStep(WithRecomputation(step, all), memory, RoundLink()).value().step_us;
    EXPECT_LT(recompute.plan.step_us, without_us);
    EXPECT_LT(recompute.plan.step_us, all_us);
    EXPECT_GT(recompute.segments.size(), 0u);
    EXPECT_LT(recompute.segments.size(), all.size());
  }
}

}  // namespace
}  // namespace pinion::testing
