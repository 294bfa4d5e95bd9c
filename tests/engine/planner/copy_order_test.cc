// The link carries 1000 bytes per microsecond, so times can be added by hand.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/planner/liveness.h"
#include "pinion/engine/planner/plan_step.h"
#include "pinion/engine/planner/residency_planner.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_simulation.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/tests/engine/planner/every_plan.h"
#include "pinion/tests/engine/planner/small_steps.h"

namespace pinion {
namespace copy_order_test {

using ::pinion::testing::ForwardAndBackward;
using ::pinion::testing::RandomChain;
using ::pinion::testing::RoundLink;
using ::testing::ElementsAre;

StepTimes TimesOf(const StepTrace& step, const std::vector<StepMove>& moves) {
  return SimulateStep(step, moves, RoundLink()).value();
}

// Returns each move's access at which its copy out is submitted.
std::vector<uint32_t> CopyAt(const std::vector<StepMove>& moves) {
  std::vector<uint32_t> copy_at;
  for (const StepMove& move : moves) copy_at.push_back(move.copy_at);
  return copy_at;
}

std::vector<uint32_t> Ordered(const StepTrace& step, const std::vector<StepMove>& moves) {
  return CopyAt(InEvictionOrder(step, moves, TimesOf(step, moves)));
}

// Moves of objects 2, 1 and 0 that are evicted at these accesses, and are fetched when they are
// read.
std::vector<StepMove> EvictedAt(uint32_t second, uint32_t first, uint32_t zeroth) {
  return {{.object = 2, .evict_at = second, .fetch_at = 5, .read_at = 5},
          {.object = 1, .evict_at = first, .fetch_at = 6, .read_at = 6},
          {.object = 0, .evict_at = zeroth, .fetch_at = 7, .read_at = 7}};
}

// Made at 10, 20, 30 and 40 us, each copied in as much time as it has thousands of bytes.
StepTrace FourObjects(uint64_t first_kb, uint64_t others_kb) {
  std::vector<StepObject> objects(4, {.size_bytes = 1000 * others_kb});
  objects[0].size_bytes = 1000 * first_kb;
  return ForwardAndBackward(objects);
}

TEST(CopyOrder, ACopyThatIsNeededLaterWaitsForOneThatIsNeededSooner) {
  // Objects 1 and 2 are created while object 0 is copied, from 20 to 50 us.
  EXPECT_THAT(Ordered(FourObjects(30, 10), EvictedAt(3, 4, 3)),
              ElementsAre(StepMove::kAtOnce, 3, StepMove::kAtOnce));
}

TEST(CopyOrder, WhereTheLinkIsFreeOrCopiesAreNeededTogetherNothingWaits) {
  const auto none_waits = ElementsAre(StepMove::kAtOnce, StepMove::kAtOnce, StepMove::kAtOnce);
  EXPECT_THAT(Ordered(FourObjects(10, 10), EvictedAt(3, 4, 4)), none_waits) << "the link is free";
  EXPECT_THAT(Ordered(FourObjects(30, 10), EvictedAt(4, 4, 4)), none_waits) << "needed together";
}

TEST(CopyOrder, WhatOneOperatorHasMadeGoesInTheOrderOfEvictionsAsWell) {
  StepTrace step = FourObjects(10, 10);
  step.operators = {1, 1, 1, 2, 3, 4, 5, 6};
  EXPECT_THAT(Ordered(step, EvictedAt(3, 5, 4)), ElementsAre(StepMove::kAtOnce, 3, 3));
}

// If a copy waits until all could be submitted, copies of objects that are evicted later wait too.
TEST(CopyOrder, WhatOneOperatorHasMadeWaitsBehindWhatIsEvictedSooner) {
  StepTrace step = FourObjects(10, 10);
  step.operators = {1, 1, 1, 2, 3, 4, 5, 6};
  std::vector<StepMove> moves = EvictedAt(5, 3, 4);
  moves[0].fetch_at = moves[0].read_at = 6;
  const std::vector<StepMove> ordered = InEvictionOrder(step, moves, TimesOf(step, moves));
  EXPECT_THAT(CopyAt(ordered), ElementsAre(3, StepMove::kAtOnce, 3));
  EXPECT_THAT(TimesOf(step, ordered).out_us, ElementsAre(70, 50, 60));
}

TEST(CopyOrder, WhatIsNotCopiedHasNoPlace) {
  std::vector<StepMove> moves = EvictedAt(3, 4, 3);
  moves[0].copies_out = false;
  EXPECT_THAT(Ordered(FourObjects(30, 10), moves),
              ElementsAre(StepMove::kAtOnce, StepMove::kAtOnce, StepMove::kAtOnce));
}

// An earlier order has no influence.
TEST(CopyOrder, OnlyTheTimesCount) {
  const StepTrace step = FourObjects(10, 10);
  std::vector<StepMove> moves = {{.object = 1, .evict_at = 4, .fetch_at = 6, .read_at = 6},
                                 {.object = 0, .evict_at = 4, .fetch_at = 7, .read_at = 7}};
  const StepTimes times = TimesOf(step, moves);
  moves[1].copy_at = 4;
  EXPECT_THAT(CopyAt(InEvictionOrder(step, moves, times)),
              ElementsAre(StepMove::kAtOnce, StepMove::kAtOnce));
}

// If an order agrees with its own simulated times, no copy begins while a ready object that is
// evicted sooner waits.
TEST(CopyOrder, NoCopyGoesBeforeOneThatIsReadyAndEvictedSooner) {
  std::mt19937 random(1);
  int waiting = 0;
  int settled = 0;
  for (int i = 0; i < 600; ++i) {
    SCOPED_TRACE(i);
    StepTrace step = RandomChain(random, 12, /*equal_sizes=*/false);
    for (uint32_t object = 0; object < step.objects.size(); ++object) {
      if (random() % 3 == 0) step.objects[object].held_until = object + random() % 8;
    }
    uint32_t operators = 0;
    for (size_t access = 0; access < step.accesses.size(); ++access) {
      step.operators.push_back(operators += random() % 3 > 0 ? 1 : 0);
    }
    const uint64_t least_bytes = LeastMemoryBytes(step).value();
    std::vector<StepMove> moves =
        PlanStep(step, least_bytes + random() % 8000, RoundLink(), PlanEffort::kRule).value().moves;
    StepTimes times = TimesOf(step, moves);
    std::vector<StepMove> ordered = InEvictionOrder(step, moves, times);
    for (int round = 0; ordered != moves && round < 10; ++round) {
      moves = ordered;
      times = TimesOf(step, moves);
      ordered = InEvictionOrder(step, moves, times);
    }
    if (ordered != moves) continue;
    ++settled;
    const std::vector<size_t> leaves_from = EarliestOffloads(step);
    for (size_t a = 0; a < moves.size(); ++a) {
      waiting += moves[a].copy_at != StepMove::kAtOnce ? 1 : 0;
      for (size_t b = 0; b < moves.size(); ++b) {
        if (!moves[a].copies_out || !moves[b].copies_out) continue;
        if (times.out_begins_us[a] >= times.out_begins_us[b]) continue;
        const size_t ready_at = std::min<size_t>(leaves_from[moves[b].object], moves[b].evict_at);
        const double ready_us = times.begins_us[ready_at] + step.intervals[ready_at].compute_us;
        if (ready_us > times.out_begins_us[a]) continue;
        EXPECT_LE(std::tie(moves[a].evict_at, moves[a].object),
                  std::tie(moves[b].evict_at, moves[b].object))
            << "object " << moves[a].object << " goes before object " << moves[b].object;
      }
    }
  }
  EXPECT_GT(settled, 500);
  EXPECT_GT(waiting, 50);
}

}  // namespace copy_order_test
}  // namespace pinion
