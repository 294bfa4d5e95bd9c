// Checks the compute time that offload costs, in exact virtual time: none with a fast enough link.

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace offload_time_test {

constexpr int64_t kRows = 256;
constexpr uint64_t kTensorBytes = kRows * kRows * sizeof(float);  // 256 KiB
constexpr int kTensors = 12;

// A product takes three times as long as the copy of its result; host calls cost nothing.
EmulatedOptions FastLinkSlowCompute() {
  EmulatedOptions options = MachineOptions();
  DevicePreset& preset = options.preset;
  const double copy_us = kTensorBytes / (preset.link.h2d_duplex_gb_per_s * 1e3);
  const double flops = 2.0 * kRows * kRows * kRows;
  preset.float32_tflop_per_s = flops / (3 * (20 * preset.link.fixed_us + copy_us)) * 1e-6;
  preset.host_call_us = 0;
  preset.host_event_us = 0;
  return options;
}

struct Pass {
  double idle_ms = 0;     // of the compute engine, until the pass's last kernel ended
  double stalled_ms = 0;  // TimeStats::stalled_on_copies_ms
};

struct Step {
  Pass forward;
  Pass backward;
  EngineStats engine;
  OffloadStats hooks;
};

// Every node makes and saves a large tensor, which its backward needs for a product. Returns the
// second of two steps, because the first one pins memory.
Step RunStep(uint64_t chunk_bytes, bool offload) {
  OffloadOptions options = SmallWindows(2 * kTensorBytes);
  options.engine.max_chunk_bytes = chunk_bytes;
  options.enabled = offload;
  EmuWorld world(FastLinkSlowCompute(), options);
  const at::Tensor carrier = NewCarrier(world);
  const at::Tensor factor = at::ones({kRows, kRows}, at::TensorOptions(world.device()));
  const auto measure = [&world](const auto& run) {
    EXPECT_THAT(world.machine().SynchronizeDevice(0), IsOk());
    world.machine().ResetTimeStats(0);
    const double before_ms = world.machine().now_ms();
    run();
    EXPECT_THAT(world.machine().SynchronizeDevice(0), IsOk());
    const TimeStats stats = world.machine().time_stats(0);
    return Pass{world.machine().now_ms() - before_ms - stats.compute_busy_ms,
                stats.stalled_on_copies_ms};
  };
  const auto forward = [&] {
    at::Tensor y = InScope(world.session(), carrier, [&](at::Tensor& y) {
      for (int i = 0; i < kTensors; ++i) {
        const at::Tensor saved = at::mm(factor, factor);
        y = Probe(y, {at::add(saved, y)},
                  [&factor](const at::Tensor& grad, const UnpackSaved& unpack) {
                    const at::Tensor read = unpack()[0];
                    at::mm(read, factor);
                    return grad;
                  });
      }
    });
    for (int i = 0; i < 4; ++i) at::mm(factor, factor);  // run concurrently with the last copies
    return y;
  };
  forward().backward();
  Step step;
  at::Tensor y;
  step.forward = measure([&] { y = forward(); });
  step.backward = measure([&] { y.backward(); });
  step.hooks = world.QuietStats();
  step.engine = world.session()->GetEngineStats(0);
  return step;
}

// In peers copies block the compute (pytorch#106360, DeepSpeed#522, transformers#43597).
TEST(OffloadTime, TensorsOfEightChunksNeverMakeTheComputeWait) {
  const Step none = RunStep(kTensorBytes / 8, /*offload=*/false);
  const Step step = RunStep(kTensorBytes / 8, /*offload=*/true);
  ASSERT_EQ(step.hooks.offloaded, 2u * kTensors);
  ASSERT_GE(step.hooks.prefetch_hits, 2u * (kTensors - 4));
  ASSERT_EQ(step.engine.d2h.submitted_chunks, 2u * 8 * kTensors);
  EXPECT_EQ(step.forward.stalled_ms, 0);
  EXPECT_EQ(step.backward.stalled_ms, 0);
  EXPECT_NEAR(step.forward.idle_ms, none.forward.idle_ms, 1e-9);
  EXPECT_NEAR(step.backward.idle_ms, none.backward.idle_ms, 1e-9);
}

// The memory is freed when the D2H copy is complete; until then the compute continues.
TEST(OffloadTime, WhatBackwardReadsBeforeItsCopyOutIsDoneMakesNoKernelWaitForTheCopy) {
  EmuWorld world(FastLinkSlowCompute(), SmallWindows(8 * kTensorBytes));
  const at::Tensor carrier = NewCarrier(world);
  const at::Tensor factor = at::ones({kRows, kRows}, at::TensorOptions(world.device()));
  TimeStats stats;
  for (int step = 0; step < 2; ++step) {  // the first pins the memory
    const at::Tensor y = InScope(world.session(), carrier, [&](at::Tensor& y) {
      y = Probe(y, {}, [&factor](const at::Tensor& grad, const UnpackSaved&) {
        at::mm(factor, factor);
        return grad;
      });
      y = Probe(y, {at::add(factor, y)}, Read);
    });
    world.machine().ResetTimeStats(0);
    y.backward();
    EXPECT_THAT(world.machine().SynchronizeDevice(0), IsOk());
    stats = world.machine().time_stats(0);
  }
  ASSERT_EQ(world.QuietStats().reused_on_device, 2u);
  ASSERT_EQ(world.session()->GetEngineStats(0).d2h.completed_transfers, 2u);
  EXPECT_GT(stats.compute_busy_ms, 0);
  EXPECT_EQ(stats.stalled_on_copies_ms, 0);
}

// Returns one step's calls that make the host wait for the device.
uint64_t HostWaits(EmuWorld& world, const TestNet& net, bool offload) {
  const auto waits = [&world] {
    return world.machine().calls(DeviceCall::kWaitEvent) +
           world.machine().calls(DeviceCall::kSynchronize);
  };
  const uint64_t before = waits();
  {
    std::optional<OffloadScope> scope;
    if (offload) scope.emplace(world.session());
    net.Loss().backward();
  }
  const uint64_t after = waits();
  for (const at::Tensor& parameter : net.parameters()) parameter.mutable_grad().reset();
  return after - before;
}

// TRL's host waits for two streams at the end of each step.
TEST(OffloadTime, AStepMakesNoCallThatWaitsForTheDevice) {
  EmuWorld world(MachineOptions(), SmallWindows(4 * kKiB));
  const TestNet net(world.device(), at::kFloat);
  ASSERT_EQ(HostWaits(world, net, /*offload=*/false), 0u) << "the test's premise";
  for (int step = 0; step < 3; ++step) EXPECT_EQ(HostWaits(world, net, /*offload=*/true), 0u);
  const OffloadStats stats = world.QuietStats();
  EXPECT_GT(stats.evicted_bytes, 0u);
  EXPECT_GT(stats.prefetch_hits, 0u);
}

}  // namespace offload_time_test
}  // namespace pinion::testing
