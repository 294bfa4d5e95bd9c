// Replays random steps. A planned step must fit the peak memory that windows need, which the device
// enforces, and must not be slower.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "pinion/bench/offload/offload_method.h"
#include "pinion/bench/offload/random_step.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/engine/planner/plan_step.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace random_steps_test {

using Kind = OffloadMethod::Kind;

constexpr uint64_t kSteps = 200;
// Divides bytes and times, so that copying bytes does not dominate the test's own time.
constexpr uint64_t kShrink = 16;
// Host calls dominate shorter steps, and windows make fewer of them by packing small copies.
constexpr double kShortestUs = 30;

absl::StatusOr<MethodCost> Replay(const StepTrace& step, const MethodWorld& world,
                                  const OffloadMethod& method) {
  // The device refuses every byte above the target.
  MethodWorld limited = world;
  if (method.kind == Kind::kPlanned) limited.memory_bytes = method.bytes;
  return RunMethod(method, limited, ReplayOf(step));
}

TEST(RandomSteps, APlannedStepKeepsWithinTheMemoryOfWindowsAndIsNotSlower) {
  MethodWorld world;
  world.preset = ScalePreset(FindPreset("h100_pcie5").value(),
                             {.flops_per_saved_byte = 1, .mean_saved_tensor_bytes = kShrink},
                             {.flops_per_saved_byte = 1, .mean_saved_tensor_bytes = 1});
  world.preset.launch_us = 0;
  world.link = LinkOf(world.preset).value();
  uint64_t binding = 0;
  for (uint64_t seed = 1; seed <= kSteps; ++seed) {
    SCOPED_TRACE(seed);
    const StepTrace step = RandomStep(seed, kShrink);
    ASSERT_THAT(step.Validate(), IsOk());
    const MethodCost alone = Replay(step, world, {Kind::kNone}).value();
    EXPECT_EQ(alone.peak_bytes, PlanStep(step, uint64_t{1} << 40, world.link)->peak_bytes);
    const MethodCost windows = Replay(step, world, {Kind::kWindows}).value();
    const uint64_t target_bytes = std::max(windows.peak_bytes, LeastMemoryBytes(step).value());
    const absl::StatusOr<MethodCost> planned = Replay(step, world, {Kind::kPlanned, target_bytes});
    ASSERT_THAT(planned, IsOk());
    if (alone.step_us < kShortestUs) {
      EXPECT_LE(planned->stall_us, windows.stall_us);
    } else {
      EXPECT_LE(planned->step_us, 1.02 * windows.step_us);
    }
    binding += target_bytes < alone.peak_bytes ? 1 : 0;
  }
  EXPECT_GT(binding, kSteps / 2);
}

}  // namespace random_steps_test
}  // namespace pinion::testing
