// Steps that nobody has thought of, replayed: a planned one keeps within the memory that windows
// have taken at their peak, of which the device refuses every byte more, and is no slower than they
// are.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/bench/offload/offload_method.h"
#include "pinion/bench/offload/replayed_step.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/plan/step_plan.h"
#include "pinion/engine/plan/step_record.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using Kind = OffloadMethod::Kind;

constexpr int kSteps = 60;

// A forward of operators that save what they make and, at times, what others have made, and a
// backward that leaves some of them out.
StepRecord RandomStep(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&random](uint64_t end) { return random() % end; };
  StepRecord step;
  std::vector<std::vector<uint32_t>> saved_by(4 + below(30));
  std::vector<int> unread;  // saves of each object
  const auto use = [&step](uint32_t object, size_t by) {
    step.uses.push_back(object);
    step.operators.push_back(static_cast<uint32_t>(by));
  };
  for (size_t by = 0; by < saved_by.size(); ++by) {
    if (!step.objects.empty() && below(3) == 0) {
      const auto again = static_cast<uint32_t>(step.objects.size() - 1 -
                                               below(std::min<size_t>(3, step.objects.size())));
      saved_by[by].push_back(again);
      step.objects[again].saved_until = static_cast<uint32_t>(step.uses.size());
      ++unread[again];
      use(again, by);
    }
    for (uint64_t makes = 1 + below(3); makes > 0; --makes) {
      const auto object = static_cast<uint32_t>(step.objects.size());
      saved_by[by].push_back(object);
      // Small ones share parcels.
      const uint64_t size_bytes = below(3) == 0 ? 1024 + below(16 * kKiB) : below(2 * kMiB) + 32;
      step.objects.push_back({.size_bytes = std::max<uint64_t>(size_bytes, 1024)});
      unread.push_back(1);
      use(object, by);
    }
  }
  for (size_t by = saved_by.size(); by-- > 0;) {
    if (below(10) == 0) continue;
    for (const uint32_t object : saved_by[by]) {
      use(object, 2 * saved_by.size() - by);
      --unread[object];
    }
  }
  const double compute_us = 1 + static_cast<double>(below(200));
  for (size_t i = 0; i <= step.uses.size(); ++i) {
    step.stretches.push_back({.compute_us = below(4) == 0 ? 0 : compute_us,
                              .other_bytes = 8 * kMiB + below(kMiB),
                              .transient_bytes = below(3) == 0 ? below(2 * kMiB) : 0});
  }
  for (size_t object = 0; object < step.objects.size(); ++object) {
    if (unread[object] > 0) {
      step.objects[object].needed_until = static_cast<uint32_t>(step.uses.size());
    }
  }
  return step;
}

absl::StatusOr<MethodCost> Replay(const StepRecord& step, const MethodWorld& world,
                                  const OffloadMethod& method) {
  // The device refuses every byte above a target.
  MethodWorld limited = world;
  if (method.kind == Kind::kPlanned) limited.memory_bytes = method.bytes;
  return RunMethod(
      method, limited,
      [&step](const std::shared_ptr<EmulatedMachine>& machine) -> absl::StatusOr<OffloadStep> {
        std::shared_ptr<ReplayedStep> replayed =
            ReplayedStep::Create(step, machine, /*layers=*/0).value();
        OffloadStep runs;
        runs.run = [replayed](const ReplayedStep::MakeScope& scope) { replayed->Run(scope); };
        return runs;
      });
}

TEST(RandomSteps, APlannedStepKeepsWithinTheMemoryOfWindowsAndIsNotSlower) {
  MethodWorld world;
  world.preset = FindPreset("h100_pcie5").value();
  world.preset.launch_us = 0;
  world.link = LinkOf(world.preset).value();
  int binding = 0;
  for (uint64_t seed = 1; seed <= kSteps; ++seed) {
    SCOPED_TRACE(seed);
    const StepRecord step = RandomStep(seed);
    ASSERT_THAT(step.Validate(), IsOk());
    const MethodCost alone = Replay(step, world, {Kind::kNone}).value();
    EXPECT_EQ(alone.peak_bytes, PlanStep(step, uint64_t{1} << 40, world.link)->peak_bytes);
    const MethodCost windows = Replay(step, world, {Kind::kWindows}).value();
    const uint64_t target_bytes = std::max(windows.peak_bytes, LeastMemoryBytes(step).value());
    const absl::StatusOr<MethodCost> planned = Replay(step, world, {Kind::kPlanned, target_bytes});
    ASSERT_THAT(planned, IsOk());
    EXPECT_LE(planned->step_us, 1.02 * windows.step_us);
    binding += target_bytes < alone.peak_bytes ? 1 : 0;
  }
  EXPECT_GT(binding, kSteps / 2);
}

}  // namespace
}  // namespace pinion::testing
