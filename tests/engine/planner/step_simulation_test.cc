// The link carries 1000 bytes per microsecond, so times can be added by hand.

#include "pinion/engine/planner/step_simulation.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/tests/engine/planner/small_steps.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace step_simulation_test {

using ::pinion::testing::ForwardAndBackward;
using ::pinion::testing::RoundLink;
using ::pinion::testing::StatusIs;
using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Each direction has half of its bandwidth while both are busy.
LinkCalibration Link(double fixed_us = 0) { return RoundLink(/*duplex_gb_per_s=*/0.5, fixed_us); }

// Two objects of 10 us on the link are made and read in reverse order; 10 us of compute each time.
StepTrace TwoObjects() {
  return ForwardAndBackward({{.size_bytes = 10000}, {.size_bytes = 10000}});
}

StepTimes Simulated(const StepTrace& step, const std::vector<StepMove>& moves,
                    const LinkCalibration& link = Link()) {
  return SimulateStep(step, moves, link).value();
}

TEST(StepSimulation, WithoutMovesAStepTakesItsCompute) {
  const StepTimes times = Simulated(TwoObjects(), {});
  EXPECT_EQ(times.step_us, 50);
  EXPECT_THAT(times.begins_us, ElementsAre(0, 10, 20, 30, 40));
  EXPECT_THAT(times.stalls_us, ElementsAre(0, 0, 0, 0, 0));
}

TEST(StepSimulation, ACopyOutBeginsOnceTheOperatorHasReturnedAndTheComputeWaitsWhereTheMemoryGoes) {
  // Created at 10 us; its operator has returned at 20 us; copied out at 30 us.
  const StepTimes times =
      Simulated(TwoObjects(), {{.object = 0, .evict_at = 1, .fetch_at = 3, .read_at = 3}});
  EXPECT_EQ(times.out_us[0], 30);
  // Requested at its read, at 50 us.
  EXPECT_EQ(times.in_us[0], 60);
  EXPECT_THAT(times.stalls_us, ElementsAre(0, 0, 10, 0, 10));
  EXPECT_EQ(times.step_us, 70);
}

TEST(StepSimulation, WhatIsComputedAgainTakesTheComputesTimeAndNoCopy) {
  StepTrace step = TwoObjects();
  step.objects[0].recast_us = 3;
  const StepTimes times = Simulated(
      step, {{.object = 0, .evict_at = 1, .fetch_at = 3, .read_at = 3, .copies_out = false}});
  EXPECT_EQ(times.in_begins_us[0], 40);
  EXPECT_EQ(times.in_us[0], 43);
  EXPECT_THAT(times.stalls_us, ElementsAre(0, 0, 0, 0, 0)) << "nothing is waited for";
  EXPECT_EQ(times.step_us, 53);
}

TEST(StepSimulation, AnOperatorThatMakesSeveralObjectsReturnsBehindTheLastOne) {
  StepTrace step = TwoObjects();
  step.operators = {7, 7, 8, 9};
  const StepTimes times =
      Simulated(step, {{.object = 0, .evict_at = 2, .fetch_at = 3, .read_at = 3}});
  EXPECT_EQ(times.out_us[0], 40) << "30 us until the operator of accesses 0 and 1 has returned";
}

TEST(StepSimulation, ACopyInThatIsAskedForEarlyHidesBehindTheCompute) {
  const StepTimes times =
      Simulated(TwoObjects(), {{.object = 0, .evict_at = 1, .fetch_at = 2, .read_at = 3}});
  EXPECT_EQ(times.in_us[0], 50);
  EXPECT_EQ(times.step_us, 60) << "the wait for the copy out alone";
}

TEST(StepSimulation, BothDirectionsAtOnceGoAtTheDuplexRates) {
  // Out: object 0 from 20, object 1 from 30 on. In: object 0 from 30 on.
  StepTrace step = TwoObjects();
  step.accesses = {0, 1, 0, 1};
  const StepTimes times =
      Simulated(step, {{.object = 0, .evict_at = 1, .fetch_at = 2, .read_at = 2},
                       {.object = 1, .evict_at = 2, .fetch_at = 3, .read_at = 3}});
  // Object 0 is copied out at 30 us. Object 1 follows at 40 us, when its operator has returned.
  EXPECT_EQ(times.out_us[0], 30);
  EXPECT_EQ(times.out_us[1], 50);
  EXPECT_EQ(times.in_us[0], 60);
  const StepTimes beside =
      Simulated(TwoObjects(), {{.object = 0, .evict_at = 1, .fetch_at = 2, .read_at = 3},
                               {.object = 1, .evict_at = 3, .fetch_at = StepMove::kNever}});
  // Object 1 is copied out from 40 us on, while object 0 is fetched: both take twice as long.
  EXPECT_EQ(beside.out_us[1], 60);
  EXPECT_EQ(beside.in_us[0], 60);
}

TEST(StepSimulation, TheFixedCostOfACopyHindersNobody) {
  const StepTimes times = Simulated(TwoObjects(),
                                    {{.object = 0, .evict_at = 1, .fetch_at = 2, .read_at = 3},
                                     {.object = 1, .evict_at = 3, .fetch_at = StepMove::kNever}},
                                    Link(/*fixed_us=*/4));
  EXPECT_EQ(times.out_us[0], 34);
  // Requested at 44 us; from 48 us on both directions run at half speed.
  EXPECT_THAT(times.in_us[0], DoubleNear(68, 1e-9));
  EXPECT_THAT(times.out_us[1], DoubleNear(68, 1e-9));
}

TEST(StepSimulation, WhatTheHostHasAlreadyGoesWithoutACopy) {
  const StepTimes times =
      Simulated(TwoObjects(),
                {{.object = 0, .evict_at = 1, .fetch_at = 2, .read_at = 3, .copies_out = false}});
  EXPECT_EQ(times.out_us[0], 0);
  EXPECT_EQ(times.step_us, 50);
}

TEST(StepSimulation, CopiesOfOneDirectionGoOneAfterTheOther) {
  const StepTrace step = ForwardAndBackward({{.size_bytes = 30000}, {.size_bytes = 10000}});
  const StepTimes times =
      Simulated(step, {{.object = 1, .evict_at = 2, .fetch_at = StepMove::kNever},
                       {.object = 0, .evict_at = 2, .fetch_at = 3, .read_at = 3}});
  EXPECT_EQ(times.out_us[1], 50) << "object 0, which was made first";
  EXPECT_EQ(times.out_us[0], 60);
}

TEST(StepSimulation, ACopyOutThatWaitsGoesBehindThoseOfTheAccessThatItWaitsFor) {
  // Objects of 20 us on the link, made at 10, 20 and 30 us: object 0 could go at 20 us.
  const StepTrace step =
      ForwardAndBackward({{.size_bytes = 20000}, {.size_bytes = 20000}, {.size_bytes = 20000}});
  std::vector<StepMove> moves = {{.object = 1, .evict_at = 2, .fetch_at = 4, .read_at = 4},
                                 {.object = 0, .evict_at = 2, .fetch_at = 5, .read_at = 5}};
  EXPECT_THAT(Simulated(step, moves).out_us, ElementsAre(60, 40));
  moves[1].copy_at = 2;
  EXPECT_THAT(Simulated(step, moves).out_us, ElementsAre(50, 70));
}

TEST(StepSimulation, OfCopiesThatWaitForOneAccessTheFirstToBeEvictedGoesFirst) {
  const StepTrace step = ForwardAndBackward(/*size_bytes=*/1000, {1, 2, 3, 4});
  std::vector<StepMove> moves = {
      {.object = 1, .evict_at = 3, .fetch_at = 6, .read_at = 6, .copy_at = 2},
      {.object = 0, .evict_at = 4, .fetch_at = 7, .read_at = 7, .copy_at = 2}};
  EXPECT_THAT(Simulated(step, moves).out_us, ElementsAre(31, 32));
  std::swap(moves[0].evict_at, moves[1].evict_at);
  EXPECT_THAT(Simulated(step, moves).out_us, ElementsAre(32, 31));
}

TEST(StepSimulation, RefusesAMoveThatIsImpossible) {
  const struct {
    StepMove move;
    const char* message;
  } rows[] = {
      {{.object = 2, .evict_at = 1, .fetch_at = 2, .read_at = 3}, "object 2"},
      {{.object = 0, .evict_at = 2, .fetch_at = 2, .read_at = 3}, "be fetched at 2"},
      {{.object = 0, .evict_at = 1, .fetch_at = 3, .read_at = 2}, "be read at 2"},
      {{.object = 0, .evict_at = 4, .fetch_at = StepMove::kNever}, "be evicted at access 4"},
      {{.object = 0, .evict_at = 1, .fetch_at = 3, .read_at = 3, .copy_at = 2},
       "object 0 cannot be copied at access 2, be evicted at access 1"},
  };
  for (const auto& [move, message] : rows) {
    EXPECT_THAT(SimulateStep(TwoObjects(), {&move, 1}, Link()),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(message)));
  }
  EXPECT_THAT(SimulateStep(TwoObjects(), {}, LinkCalibration()),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("d2h.gb_per_s")));
}

}  // namespace step_simulation_test
}  // namespace pinion
