#include "pinion/bench/peers/graph_plan.h"

#include <map>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace pinion {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

constexpr int kStays = GraphPlan::kStays;

// A step of layers 0, 1, ... with one region each, between a region before and one after the
// layers. The layer that makes an object saves it. The backward reads in reverse order.
class Step {
 public:
  void Make(int layer, uint64_t size_bytes) {
    const int object = static_cast<int>(trace.objects.size());
    trace.objects.push_back({.size_bytes = size_bytes, .layer = layer, .region = layer + 1});
    Save(object, layer);
  }
  void Save(int object, int layer) {
    trace.saves.push_back({.object = object, .layer = layer, .region = layer + 1});
    trace.reads.insert(trace.reads.begin(), static_cast<int>(trace.saves.size()) - 1);
  }
  GraphPlan Plan(const GraphLimits& limits = {}) const { return PlanGraph(trace, limits); }

  GraphTrace trace;
};

// Layer i makes an object of sizes[i] bytes; one additional last layer makes another object.
Step LayersOf(const std::vector<uint64_t>& sizes) {
  Step step;
  for (size_t i = 0; i < sizes.size(); ++i) step.Make(static_cast<int>(i), sizes[i]);
  step.Make(static_cast<int>(sizes.size()), 1 << 20);
  return step;
}

TEST(GraphPlanTest, WhatTheLastLayerOrNoLayerMakesStays) {
  Step step;
  step.Make(kNotInLayers, 8192);
  step.Make(0, 8192);
  step.Make(1, 8192);
  EXPECT_THAT(step.Plan().leaves_after, ElementsAre(kStays, 2, kStays));
}

TEST(GraphPlanTest, TheOnlyLayerIsNotTheLastOne) {
  Step step;
  step.Make(kNotInLayers, 8192);
  step.Make(0, 8192);
  EXPECT_THAT(step.Plan().leaves_after, ElementsAre(kStays, 2));
}

TEST(GraphPlanTest, ObjectsOfLessThanFourKiBStay) {
  EXPECT_THAT(LayersOf({4095, 4096}).Plan().leaves_after, ElementsAre(kStays, 3, kStays));
}

TEST(GraphPlanTest, WhatIsNotContiguousStays) {
  Step step = LayersOf({8192, 8192});
  step.trace.objects[0].is_contiguous = false;
  EXPECT_THAT(step.Plan().leaves_after, ElementsAre(kStays, 3, kStays));
}

TEST(GraphPlanTest, TheLargestLeaveWithinTheBudget) {
  const Step step = LayersOf({4096, 16384, 8192});
  EXPECT_THAT(step.Plan({.host_budget_bytes = 16384 + 8192}).leaves_after,
              ElementsAre(kStays, 3, 4, kStays));
}

TEST(GraphPlanTest, ASmallerOneLeavesWhereALargerOneHasNoRoom) {
  const Step step = LayersOf({4096, 16384, 8192});
  EXPECT_THAT(step.Plan({.host_budget_bytes = 16384 + 8191}).leaves_after,
              ElementsAre(2, 3, kStays, kStays));
}

TEST(GraphPlanTest, OfEqualOnesTheFirstLeave) {
  const Step step = LayersOf({8192, 8192, 8192});
  EXPECT_THAT(step.Plan({.host_budget_bytes = 2 * 8192}).leaves_after,
              ElementsAre(2, 3, kStays, kStays));
}

TEST(GraphPlanTest, ABudgetOfNothingIsNoBudget) {
  EXPECT_THAT(LayersOf({8192, 8192}).Plan({.host_budget_bytes = 0}).leaves_after,
              ElementsAre(2, 3, kStays));
}

TEST(GraphPlanTest, MemoryGoesSoManyLayersAfterTheOneThatMadeIt) {
  const Step step = LayersOf({8192, 8192});
  EXPECT_THAT(step.Plan({.defer_n_layers = 0}).leaves_after, ElementsAre(1, 2, kStays));
  EXPECT_THAT(step.Plan({.defer_n_layers = 8}).leaves_after, ElementsAre(9, 10, kStays));
}

TEST(GraphPlanTest, MemoryDoesNotGoBeforeItIsSavedForTheLastTime) {
  Step step = LayersOf({8192, 8192, 8192});
  step.Save(/*object=*/0, /*layer=*/3);
  EXPECT_THAT(step.Plan().leaves_after, ElementsAre(4, 3, 4, kStays));
}

TEST(GraphPlanTest, ALayerIsFetchedWhenBackwardGetsToTheOneBeforeIt) {
  const GraphPlan plan = LayersOf({8192, 8192, 8192}).Plan();
  EXPECT_THAT(plan.fetched_at, ElementsAre(Pair(1, ElementsAre(0)), Pair(2, ElementsAre(1)),
                                           Pair(3, ElementsAre(2))));
  EXPECT_THAT(plan.fetched_first, IsEmpty());
}

TEST(GraphPlanTest, WhatIsFetchedBeforeTheLastLayerIsFetchedFirst) {
  const GraphPlan plan = LayersOf({8192, 8192, 8192}).Plan({.prefetch_n_layers = 2});
  EXPECT_THAT(plan.fetched_first, ElementsAre(2));
  EXPECT_THAT(plan.fetched_at, ElementsAre(Pair(2, ElementsAre(0)), Pair(3, ElementsAre(1))));
}

TEST(GraphPlanTest, ObjectsOfALayerAreFetchedInTheOrderOfTheirFirstReads) {
  Step step;
  step.Make(0, 8192);
  step.Make(0, 8192);
  step.Make(1, 8192);
  step.Save(/*object=*/0, /*layer=*/1);
  EXPECT_THAT(step.Plan().fetched_at, ElementsAre(Pair(1, ElementsAre(0, 1))));
}

TEST(GraphPlanTest, WithoutPrefetchNothingIsFetchedAhead) {
  const GraphPlan plan = LayersOf({8192, 8192}).Plan({.prefetch_n_layers = 0});
  EXPECT_THAT(plan.fetched_at, IsEmpty());
  EXPECT_THAT(plan.fetched_first, IsEmpty());
}

}  // namespace
}  // namespace pinion
