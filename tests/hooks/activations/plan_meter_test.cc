// Checks which steps are measured, and that a measurement spans one step.

#include "pinion/hooks/activations/plan_meter.h"

#include <ATen/ops/ones.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/engine/schedule/plan_cache.h"
#include "pinion/engine/schedule/plan_validator.h"
#include "pinion/engine/stream/stream_clock.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace plan_meter_test {

std::shared_ptr<const CachedPlan> SomePlan() {
  StepTrace step;
  step.objects.resize(1);
  step.accesses = {0, 0};
  step.intervals.resize(3);
  StepPlan plan;
  plan.step_us = 1;
  return std::make_shared<const CachedPlan>(step, plan);
}

// A step above its target is planned again at once. Nobody notes the end of its measurement.
TEST(PlanMeter, AMeasuredStepAboveItsTargetIsNotMeasuredTogetherWithTheNext) {
  EmuWorld world;
  if (TestsRunOnGpu()) GTEST_SKIP() << "times are never the same twice";
  constexpr int64_t kTargetBytes = 100;
  PlanMeter meter(world.device(), std::make_shared<StreamClock>(world.backend().Open(0).value()),
                  kTargetBytes);
  const std::shared_ptr<const CachedPlan> plan = SomePlan();
  const auto run_step = [&](bool is_over) {
    const std::optional<bool> is_off = meter.BeginStep(plan, {});
    for (int i = 0; i < 16; ++i) at::ones({1 << 16}, at::TensorOptions(world.device()));
    if (is_over) meter.OnDeviceBytes(kTargetBytes + 1, 0, 0);
    meter.EndStep();
    EXPECT_TRUE(world.Synchronize().ok());
    return is_off.has_value();
  };
  // How long a step takes is learned from the first measurement.
  while (!run_step(false)) {
  }
  while (!meter.IsDue()) run_step(false);
  ASSERT_FALSE(run_step(true));
  EXPECT_TRUE(run_step(false)) << "the last step was above its target";
  for (uint64_t step = 0; step < 8 * PlanValidator::kEvery; ++step) {
    EXPECT_FALSE(run_step(false)) << step;
  }
}

// The allocator reports that weights were freed before they count as gone.
TEST(PlanMeter, WhatGrewAfterWeightsWereEvictedIsCountedWithoutThem) {
  EmuWorld world;
  PlanMeter meter(world.device(), std::make_shared<StreamClock>(world.backend().Open(0).value()),
                  /*target_bytes=*/1000);
  meter.BeginStep(SomePlan(), {});
  meter.OnDeviceBytes(/*allocated_bytes=*/100, /*added_bytes=*/100, /*streamed_bytes=*/40);
  meter.OnDeviceBytes(60, 0, 40);
  meter.EndAccess(/*streamed_bytes=*/0);
  meter.OnDeviceBytes(70, 10, 0);
  const auto growth = meter.NoteBytes({.current = 70, .peak = 100, .allocated = 110});
  ASSERT_TRUE(growth.has_value());
  EXPECT_EQ(growth->size_bytes, 10u);
  EXPECT_FALSE(growth->exceeds);
}

// An event would become part of the graph.
TEST(PlanMeter, AStepThatBeginsWhileAGraphIsCapturedIsNotMeasured) {
  EmuWorld world;
  const StreamHandle stream = world.machine().default_stream(0);
  PlanMeter meter(world.device(), std::make_shared<StreamClock>(world.backend().Open(0).value()),
                  /*target_bytes=*/std::nullopt);
  const std::shared_ptr<const CachedPlan> plan = SomePlan();
  const auto events_of_due_step = [&](bool is_captured) {
    while (!meter.IsDue()) meter.BeginStep(plan, {});
    EXPECT_THAT(world.machine().SetCapturing(stream, is_captured), IsOk());
    const uint64_t before = world.machine().calls(DeviceCall::kRecordEvent);
    meter.BeginStep(plan, {});
    EXPECT_THAT(world.machine().SetCapturing(stream, false), IsOk());
    return world.machine().calls(DeviceCall::kRecordEvent) - before;
  };
  EXPECT_EQ(events_of_due_step(/*is_captured=*/true), 0u);
  EXPECT_EQ(events_of_due_step(/*is_captured=*/false), 1u);
}

}  // namespace plan_meter_test
}  // namespace pinion::testing
