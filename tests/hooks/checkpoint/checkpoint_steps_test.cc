// Checks gradients and memory of checkpoints over many random models and over many steps.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/checkpoint/checkpoint.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/footprint.h"
#include "pinion/tests/hooks/support/random_model.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace {

constexpr uint64_t kModels = 200;

at::Tensor Checkpointed(const RandomNet::Layers& layers, at::Tensor x) {
  return checkpoint(layers, std::move(x));
}

// Chooses by seed: no session, copy windows, or a memory target.
std::shared_ptr<OffloadSession> SessionOf(const RandomModel& model, EmuWorld& world) {
  if (model.seed % 3 == 0) return nullptr;
  if (model.seed % 3 == 1) return world.session();
  OffloadOptions options = SmallWindows(OffloadOptions::kAutoWindow);
  options.memory_target_bytes = 1;
  return world.NewSession(options);
}

TEST(CheckpointSteps, RandomModelsWithCheckpointsAnywhereHaveTheirBits) {
  uint64_t offloaded = 0, nested = 0;
  for (uint64_t seed = 1; seed <= kModels; ++seed) {
    SCOPED_TRACE(::testing::Message() << "model " << seed);
    const RandomModel model = RandomModel::Draw(seed);
    EmuWorld world;
    RandomNet plain(model, world.device()), checkpointed(model, world.device());
    checkpointed.set_checkpointing(Checkpointed);
    const std::shared_ptr<OffloadSession> session = SessionOf(model, world);
    for (const RandomModel::Step& step : model.steps) {
      SCOPED_TRACE(step.ToString());
      ExpectSameGradients(plain.Step(step, nullptr), checkpointed.Step(step, session));
      if (HasFailure()) return;
    }
    if (session != nullptr) offloaded += session->GetStats().fetched_bytes > 0;
    for (const RandomModel::Block& block : model.blocks) nested += block.checkpoints > 1;
  }
  EXPECT_GT(offloaded, kModels / 2);
  EXPECT_GT(nested, kModels);
}

TEST(CheckpointSteps, ManyStepsHaveWhatAHundredHad) {
  constexpr int kSteps = 800, kEarly = 100;
  OffloadOptions options = SmallWindows(1);
  options.min_offload_bytes = 1;
  EmuWorld world(MachineOptions(), options);
  RandomModel model;
  model.seed = 1;
  model.channels = 16;
  for (int i = 0; i < RandomModel::kLayers; ++i) {
    model.blocks.push_back({.layer = static_cast<RandomModel::Layer>(i),
                            .branch = std::nullopt,
                            .skip = std::nullopt,
                            .checkpoints = 1 + i % 2});
  }
  model.steps.push_back({.rows = 8, .takes_branch = std::vector<bool>(model.blocks.size())});
  RandomNet net(model, world.device());
  net.set_checkpointing(Checkpointed);
  const auto step = [&] { net.Step(model.steps[0], world.session()); };
  for (int n = 0; n < kEarly; ++n) step();
  const Footprint early = FootprintOf(world);
  // Less than half a byte for each tensor that a segment saves.
  EXPECT_LT(LeastHeapGrowth(world, kSteps, step), kSteps / 4 * 8);
  const Footprint late = FootprintOf(world);
  EXPECT_GT(world.session()->GetStats().fetched_bytes, 0u);
  EXPECT_EQ(late.device_bytes, early.device_bytes);
  EXPECT_EQ(late.pinned_bytes, early.pinned_bytes);
  EXPECT_EQ(late.host_bytes, 0u);
  EXPECT_EQ(late.handles, 0u);
}

}  // namespace
}  // namespace pinion::testing
