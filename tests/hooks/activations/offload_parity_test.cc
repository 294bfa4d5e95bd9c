// Checks that gradients equal those without offload, bit by bit, in every order of the device's
// effects. Also checks that the device's peak falls and that host memory is pinned once.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <iterator>
#include <string>
#include <tuple>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace {

Gradients PlainGradients(c10::ScalarType dtype, const NetShape& shape = {}) {
  EmuWorld world(MachineOptions(EffectSchedule::kEarly));
  const TestNet net(world.device(), dtype, shape);
  return TrainStep(net, nullptr);
}

using Modes = std::tuple<EffectSchedule, ReuseMode, c10::ScalarType>;

class OffloadParity : public ::testing::TestWithParam<Modes> {
 protected:
  EmulatedOptions machine(uint64_t seed = 1) const {
    return MachineOptions(std::get<0>(GetParam()), std::get<1>(GetParam()), seed);
  }
  c10::ScalarType dtype() const { return std::get<2>(GetParam()); }
};

TEST_P(OffloadParity, GradientsAreBitwiseTheSame) {
  const Gradients plain = PlainGradients(dtype());
  EmuWorld world(machine());
  const TestNet net(world.device(), dtype());
  for (int step = 0; step < 3; ++step) {
    ExpectSameGradients(plain, TrainStep(net, world.session()));
  }
  const OffloadStats stats = world.session()->GetStats();
  EXPECT_GT(stats.evicted_bytes, 0u);
  EXPECT_GT(stats.prefetch_hits, 0u);
  EXPECT_GT(stats.groups, 0u);
  EXPECT_EQ(stats.prefetches_dropped, 0u) << "what was read is fetched again";
}

TEST_P(OffloadParity, GradientsAreBitwiseTheSameWhenCopiesBlock) {
  const Gradients plain = PlainGradients(dtype());
  OffloadOptions blocking = SmallWindows();
  blocking.overlap = false;
  EmuWorld world(machine(), blocking);
  const TestNet net(world.device(), dtype());
  for (int step = 0; step < 2; ++step) {
    ExpectSameGradients(plain, TrainStep(net, world.session()));
  }
  EXPECT_GT(world.session()->GetStats().fetched_on_demand, 0u);
  EXPECT_EQ(world.session()->GetStats().prefetch_hits, 0u);
}

std::string ModeName(EffectSchedule schedule, ReuseMode reuse) {
  static constexpr const char* kSchedules[] = {"Early", "Late", "Random"};
  return std::string(kSchedules[static_cast<int>(schedule)]) +
         (reuse == ReuseMode::kImmediate ? "Immediate" : "Quarantine");
}

INSTANTIATE_TEST_SUITE_P(
    AllModes, OffloadParity,
    ::testing::Combine(::testing::Values(EffectSchedule::kEarly, EffectSchedule::kLate,
                                         EffectSchedule::kRandom),
                       ::testing::Values(ReuseMode::kImmediate, ReuseMode::kQuarantine),
                       ::testing::Values(at::kFloat, at::kBFloat16)),
    [](const auto& info) {
      return ModeName(std::get<0>(info.param), std::get<1>(info.param)) +
             c10::toString(std::get<2>(info.param));
    });

class OffloadParitySeeds : public ::testing::TestWithParam<std::tuple<EffectSchedule, ReuseMode>> {
};

// A detected race aborts the process after printing the seed and both accesses.
TEST_P(OffloadParitySeeds, NoneFindsARaceOrAnotherGradient) {
  const auto [schedule, reuse] = GetParam();
  constexpr uint64_t kWindows[] = {1, 5 << 10, 24 << 10, OffloadOptions::kAutoWindow};
  // Schedules that ignore the seed run once with each window.
  const uint64_t seeds = schedule == EffectSchedule::kRandom ? 200 : std::size(kWindows);
  NetShape shape;
  shape.layers = 1;
  const Gradients plain = PlainGradients(at::kFloat, shape);
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    const EmulatedOptions machine = MachineOptions(schedule, reuse, seed);
    const uint64_t window_bytes = kWindows[seed % std::size(kWindows)];
    SCOPED_TRACE(Describe(machine) + ", windows of " + std::to_string(window_bytes) + " bytes");
    EmuWorld world(machine, SmallWindows(window_bytes));
    const TestNet net(world.device(), at::kFloat, shape);
    ExpectSameGradients(plain, TrainStep(net, world.session()));
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(
    AllModes, OffloadParitySeeds,
    ::testing::Combine(::testing::Values(EffectSchedule::kEarly, EffectSchedule::kLate,
                                         EffectSchedule::kRandom),
                       ::testing::Values(ReuseMode::kImmediate, ReuseMode::kQuarantine)),
    [](const auto& info) { return ModeName(std::get<0>(info.param), std::get<1>(info.param)); });

TEST(OffloadMemory, PeakDeviceMemoryFalls) {
  NetShape shape;
  shape.layers = 6;
  shape.batch = 4;
  const auto peak_bytes = [&](bool offload) {
    EmuWorld world(MachineOptions(), SmallWindows(32 * kKiB));
    const TestNet net(world.device(), at::kFloat, shape);
    const uint64_t base_bytes = world.device_bytes();
    world.ResetPeak();
    TrainStep(net, offload ? world.session() : nullptr);
    return world.peak_device_bytes() - base_bytes;
  };
  const uint64_t without = peak_bytes(false);
  EXPECT_LT(peak_bytes(true), without / 2) << "without offload: " << without;
}

// peers: PyTorch's compiled activation offload lost 465 ms a step to one cudaHostAlloc per tensor,
// until the results were pooled.
TEST(OffloadMemory, NothingIsPinnedOnceDemandHasStoppedRising) {
  EmuWorld world;
  const TestNet net(world.device(), at::kFloat);
  for (int step = 0; step < 2; ++step) TrainStep(net, world.session());
  const uint64_t pin_calls = world.session()->GetAllocatorStats().pin_calls;
  EXPECT_GT(pin_calls, 0u);
  for (int step = 0; step < 5; ++step) TrainStep(net, world.session());
  EXPECT_EQ(world.session()->GetAllocatorStats().pin_calls, pin_calls);
}

TEST(OffloadMemory, TrimGivesCachedHostMemoryBack) {
  EmuWorld world;
  const TestNet net(world.device(), at::kFloat);
  TrainStep(net, world.session());
  world.ExpectNothingLeft();
  EXPECT_GT(world.session()->GetAllocatorStats().locked_bytes.current, 0u);
  EXPECT_TRUE(world.session()->Trim(0).ok());
  EXPECT_EQ(world.session()->GetAllocatorStats().locked_bytes.current, 0u);
}

class OffloadStatsInvariants : public ::testing::TestWithParam<bool> {};

TEST_P(OffloadStatsInvariants, EverySavedTensorWentSomewhere) {
  OffloadOptions options = SmallWindows();
  options.overlap = GetParam();
  EmuWorld world(MachineOptions(), options);
  const TestNet net(world.device(), at::kFloat);
  for (int step = 0; step < 3; ++step) {
    TrainStep(net, world.session());
    const OffloadStats stats = world.QuietStats();
    EXPECT_EQ(stats.packed, stats.offloaded + stats.shared + stats.kept()) << stats.ToString();
    EXPECT_GE(stats.unpacked,
              stats.reused_on_device + stats.prefetch_hits + stats.fetched_on_demand);
    EXPECT_LE(stats.evicted_bytes, stats.offloaded_bytes);
    EXPECT_GT(stats.offloaded, 0u);
    EXPECT_GT(stats.shared, 0u);
    EXPECT_GT(stats.kept_parameter, 0u);
  }
  world.ExpectNothingLeft();
}

INSTANTIATE_TEST_SUITE_P(OverlapOrNot, OffloadStatsInvariants, ::testing::Bool());

// The engine's own counters verify the bytes that the session reports.
TEST(OffloadMemory, TheLinkCarriesWhatTheStatisticsSay) {
  EmuWorld world;
  const TestNet net(world.device(), at::kFloat);
  TrainStep(net, world.session());
  const OffloadStats stats = world.QuietStats();
  const EngineStats engine = world.session()->GetEngineStats(0);
  EXPECT_EQ(engine.d2h.submitted_bytes, stats.offloaded_bytes);
  EXPECT_EQ(engine.h2d.submitted_bytes, stats.fetched_bytes);
  EXPECT_EQ(engine.d2h.completed_bytes, stats.offloaded_bytes);
}

}  // namespace
}  // namespace pinion::testing
