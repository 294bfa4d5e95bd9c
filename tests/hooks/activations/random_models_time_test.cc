// Checks with two hundred random models, on devices scaled to them, that planned steps are not
// slower than steps with windows in the same memory.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/random_model.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace random_models_time_test {

constexpr uint64_t kModels = 200;
constexpr double kSlowest = 1.02;  // relative to windows
// Minimum steps before the timed ones: all kinds then have plans, and nothing is recorded.
constexpr size_t kWarmUp = 7;
constexpr size_t kRounds = 4;  // minimum rounds of all kinds, too

// Costs per tensor are scaled for tensors of a few KiB and costs per byte are kept. Compute takes
// longer or shorter than the link.
EmulatedOptions MachineOf(const RandomModel& model) {
  const std::vector<std::string> presets = PresetNames();
  EmulatedOptions options = MachineOptions();
  options.preset = ScalePreset(FindPreset(presets[model.seed % presets.size()]).value(),
                               {.flops_per_saved_byte = 1, .mean_saved_tensor_bytes = 4 * kMiB},
                               {.flops_per_saved_byte = 1, .mean_saved_tensor_bytes = 4 * kKiB});
  constexpr double kFlopsPerByte[] = {4, 12, 36, 108};  // per byte on the link
  options.preset.float32_tflop_per_s =
      options.preset.link.d2h_gb_per_s * kFlopsPerByte[model.seed / presets.size() % 4] * 1e-3;
  options.detect_races = false;
  return options;
}

// Returns a session's calibration of the link; each device is measured once.
LinkCalibration LinkOf(const EmulatedOptions& machine) {
  static std::map<std::string, LinkCalibration> links;
  const auto found = links.find(machine.preset.name);
  if (found != links.end()) return found->second;
  OffloadOptions options = SmallWindows();
  options.link.reset();
  EmuWorld world(machine, options);
  EXPECT_THAT(world.session()->Reserve(0, kMiB), IsOk());
  return links[machine.preset.name] = world.session()->GetLink(0).value();
}

struct Cost {
  double us = 0;  // modelled, for a step of each kind
  uint64_t peak_bytes = 0;
};

// Runs `rounds` of all kinds of steps, and times the last.
Cost CostOf(const RandomModel& model, size_t rounds, uint64_t target_bytes) {
  const EmulatedOptions machine = MachineOf(model);
  OffloadOptions options = SmallWindows(OffloadOptions::kAutoWindow);
  options.link = LinkOf(machine);
  options.memory_target_bytes = target_bytes;
  EmuWorld world(machine, options);
  RandomNet net(model, world.device());
  EXPECT_THAT(world.Synchronize(), IsOk());
  double begin_ms = 0;
  for (size_t round = 1; round <= rounds; ++round) {
    world.ResetPeak();
    begin_ms = world.machine().now_ms();
    for (const RandomModel::Step& step : model.steps) {
      net.Step(step, world.session());
      EXPECT_THAT(world.Synchronize(), IsOk());
    }
  }
  return {.us = (world.machine().now_ms() - begin_ms) * 1e3,
          .peak_bytes = world.peak_device_bytes()};
}

TEST(RandomModelTimes, InTheMemoryOfWindowsPlannedStepsAreNotSlower) {
  uint64_t faster = 0;
  for (uint64_t seed = 1; seed <= kModels; ++seed) {
    SCOPED_TRACE(::testing::Message() << "model " << seed);
    const RandomModel model = RandomModel::Draw(seed);
    const size_t kinds = model.steps.size();
    const size_t rounds = std::max(kRounds, (kWarmUp + kinds - 1) / kinds) + 1;
    const Cost windows = CostOf(model, rounds, OffloadOptions::kNoTarget);
    const Cost least = CostOf(model, 1, /*target_bytes=*/1);
    const Cost planned = CostOf(model, rounds, std::max(windows.peak_bytes, least.peak_bytes));
    EXPECT_LE(planned.us, kSlowest * windows.us);
    faster += planned.us * kSlowest < windows.us;
  }
  // If the link keeps up with windows as well, plans gain nothing.
  EXPECT_GT(faster, kModels / 4);
}

}  // namespace random_models_time_test
}  // namespace pinion::testing
