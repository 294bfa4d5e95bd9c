// Checks two hundred random models within a memory target: each step's losses and gradients equal
// those without offload, bit by bit. The device refuses every byte above the target.

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/random_model.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace random_models_test {

constexpr uint64_t kModels = 200;

// The order of effects depends on the model.
EmulatedOptions MachineOf(const RandomModel& model) {
  constexpr EffectSchedule kSchedules[] = {EffectSchedule::kEarly, EffectSchedule::kLate,
                                           EffectSchedule::kRandom};
  return MachineOptions(kSchedules[model.seed % 3],
                        model.seed % 2 == 0 ? ReuseMode::kImmediate : ReuseMode::kQuarantine,
                        model.seed);
}

enum class Order { kDrawn, kEachOnce };

struct RunOfModel {
  std::vector<Gradients> steps;
  uint64_t peak_bytes = 0;
  OffloadStats stats;
};

// Runs the model in a session with that target, or without a session.
RunOfModel RunAll(const RandomModel& model, std::optional<uint64_t> target_bytes,
                  Order order = Order::kDrawn, std::optional<uint64_t> limit_bytes = std::nullopt) {
  EmuWorld world(MachineOf(model), WithTarget(target_bytes.value_or(OffloadOptions::kAutoTarget)));
  RandomNet net(model, world.device());
  RunOfModel run;
  EXPECT_THAT(world.Synchronize(), IsOk());
  world.ResetPeak();
  if (limit_bytes.has_value()) {
    EXPECT_THAT(world.machine().SetMemoryLimit(0, *limit_bytes), IsOk());
  }
  const size_t steps = order == Order::kDrawn ? model.order.size() : model.steps.size();
  try {
    for (size_t i = 0; i < steps; ++i) {
      const size_t kind = order == Order::kDrawn ? model.order[i] : i;
      run.steps.push_back(net.Step(model.steps[kind], target_bytes ? world.session() : nullptr));
    }
  } catch (const c10::Error& error) {
    ADD_FAILURE() << "step " << run.steps.size() << ": " << error.what_without_backtrace();
  }
  run.stats = world.QuietStats();
  run.peak_bytes = world.peak_device_bytes();
  return run;
}

bool HasTwoForwards(const RandomModel& model) {
  return std::any_of(model.steps.begin(), model.steps.end(),
                     [](const RandomModel::Step& step) { return step.forwards > 1; });
}

bool KeepsGraphs(const RandomModel& model) {
  return std::any_of(model.steps.begin(), model.steps.end(),
                     [](const RandomModel::Step& step) { return step.backwards > 1; });
}

template <typename Field>
bool Changes(const RandomModel& model, Field RandomModel::Step::*field) {
  return std::any_of(model.steps.begin(), model.steps.end(), [&](const RandomModel::Step& step) {
    return step.*field != model.steps.front().*field;
  });
}

TEST(RandomModels, WithinAnyTargetEachStepHasTheBitsOfOneWithoutOffload) {
  uint64_t planned = 0, fetched = 0, branches = 0, shapes = 0, two_forwards = 0, kept_graphs = 0;
  for (uint64_t seed = 1; seed <= kModels; ++seed) {
    SCOPED_TRACE(::testing::Message() << "model " << seed);
    const RandomModel model = RandomModel::Draw(seed);
    const RunOfModel plain = RunAll(model, std::nullopt);
    const RunOfModel least = RunAll(model, /*target_bytes=*/1, Order::kEachOnce);
    std::mt19937_64 random(seed);
    const uint64_t target_bytes =
        least.peak_bytes + random() % (plain.peak_bytes - least.peak_bytes + 1);
    const RunOfModel run = RunAll(model, target_bytes, Order::kDrawn, target_bytes);
    if (run.steps.size() < plain.steps.size()) continue;  // reported above
    for (size_t i = 0; i < run.steps.size(); ++i) {
      SCOPED_TRACE(::testing::Message()
                   << "step " << i << ": " << model.steps[model.order[i]].ToString());
      ASSERT_TRUE(plain.steps[i].loss.isfinite().item<bool>());
      ExpectSameGradients(plain.steps[i], run.steps[i]);
    }
    EXPECT_EQ(run.stats.prefetches_refused, 0u) << "the device was asked for more than it has";
    planned += run.stats.kept_as_planned > 0;
    fetched += run.stats.prefetch_hits > 0;
    branches += Changes(model, &RandomModel::Step::takes_branch);
    shapes += Changes(model, &RandomModel::Step::rows);
    two_forwards += HasTwoForwards(model);
    kept_graphs += KeepsGraphs(model);
  }
  // Checks that the random models cover the intended cases.
  EXPECT_EQ(planned, kModels);
  EXPECT_GT(fetched, kModels / 2);
  EXPECT_GT(branches, kModels / 4);
  EXPECT_GT(shapes, kModels / 4);
  EXPECT_GT(two_forwards, kModels / 4);
  EXPECT_GT(kept_graphs, kModels / 4);
}

}  // namespace random_models_test
}  // namespace pinion::testing
