// A session submits copies out in its plan's order, and so the step takes the planned time.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "pinion/bench/offload/offload_method.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/engine/planner/plan_step.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_simulation.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion::testing {
namespace planned_copies_test {

constexpr uint64_t kUnitBytes = 64 * 1024;

// Objects 0 and 2 have to go before object 4 is made. While object 0 is copied object 1 could be
// copied next, but somebody holds it until the turn. An interval takes as long as a third of the
// copy of object 0 or 1.
StepTrace Step(double copy_us) {
  StepTrace step;
  for (const uint64_t units : {30, 30, 4, 4, 4}) {
    step.objects.push_back({.size_bytes = units * kUnitBytes});
  }
  step.objects[1].held_until = 5;
  step.accesses = {0, 1, 2, 3, 4, 4, 3, 2, 1, 0};
  // Backward frees each object that it has read.
  for (uint32_t object = 0; object < 5; ++object) step.objects[object].needed_until = 10 - object;
  step.intervals.assign(step.accesses.size() + 1, {.compute_us = copy_us / 3});
  step.intervals[4].transient_bytes = 36 * kUnitBytes;
  step.intervals[6].transient_bytes = 50 * kUnitBytes;
  return step;
}

TEST(PlannedCopies, WhatHasToGoFirstIsCopiedFirst) {
  MethodWorld world;
  world.preset = FindPreset("a100_pcie4").value();
  world.preset.launch_us = 0;
  world.link = LinkOf(world.preset).value();
  const StepTrace step = Step(30 * kUnitBytes / world.link.d2h.gb_per_s / 1e3);
  const uint64_t target_bytes = 74 * kUnitBytes;
  const StepPlan plan = PlanStep(step, target_bytes, world.link).value();
  std::vector<StepMove> as_made = plan.moves;
  for (StepMove& move : as_made) move.copy_at = StepMove::kAtOnce;
  const double as_made_us = SimulateStep(step, as_made, world.link).value().step_us;
  ASSERT_GT(as_made_us, 1.05 * plan.step_us) << "the order matters";

  world.memory_bytes = target_bytes;  // the device refuses any byte more
  const absl::StatusOr<MethodCost> cost =
      RunMethod({OffloadMethod::Kind::kPlanned, target_bytes}, world, ReplayOf(step));
  ASSERT_TRUE(cost.ok()) << cost.status();
  EXPECT_LE(cost->step_us, 1.01 * plan.step_us);
  EXPECT_EQ(cost->moved_bytes, 2 * 64 * kUnitBytes) << "objects 0, 1 and 2, both ways";
}

}  // namespace planned_copies_test
}  // namespace pinion::testing
