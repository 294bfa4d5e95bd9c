// Checks the memory that attribution takes on the devices and the host, and its time.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/host_copies.h"
#include "pinion/hooks/attribution/layer_methods.h"
#include "pinion/hooks/attribution/layer_options.h"
#include "pinion/hooks/attribution/layer_pass.h"
#include "pinion/hooks/attribution/path_methods.h"
#include "pinion/hooks/attribution/tap.h"
#include "pinion/hooks/attribution/tapped_module.h"
#include "pinion/hooks/attribution/target.h"
#include "pinion/tests/hooks/attribution/attribution_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

TEST_F(AttributionTest, ThePeakIsThatOfThePlainStepAndTwoCaptures) {
  constexpr int kLayers = 12;
  const Tensor x = Make(1).requires_grad_();
  world_.ResetPeak();
  const uint64_t model_bytes = world_.device_bytes();
  Chain(x, kLayers, /*taps=*/false).sum().backward();
  x.mutable_grad() = Tensor();
  ASSERT_TRUE(Soon([&] { return world_.device_bytes() == model_bytes; }));
  const uint64_t plain_bytes = world_.peak_device_bytes();
  ASSERT_GE(plain_bytes, model_bytes + kLayers * kLayerBytes) << "forward saves every layer";

  world_.ResetPeak();
  const std::vector<LayerResult> layers = ComputeChain(kLayers, x);
  EXPECT_LE(world_.peak_device_bytes(), plain_bytes + 2 * kLayerBytes + 4096);
  ASSERT_EQ(layers.size(), static_cast<size_t>(kLayers));
  for (const LayerResult& layer : layers) EXPECT_TRUE(layer.tensors[0].gradient.is_cpu());
}

TEST_F(AttributionTest, ParallelLayersLeaveOneByOneAsWell) {
  constexpr int kLayers = 12;
  const Tensor x = Make(1);
  const auto branches = [&](bool taps) {
    Tensor sum = at::zeros({kSide}, x.options());
    for (int layer = 0; layer < kLayers; ++layer) {
      // Without taps nothing requires a gradient, so no branch saves anything.
      Tensor y = x + layer;
      if (taps) y = Tap("layer" + std::to_string(layer), y);
      sum = sum + (y * 2).sum(1);
    }
    return sum;
  };
  world_.ResetPeak();
  branches(/*taps=*/false);
  const uint64_t plain_bytes = world_.peak_device_bytes();
  ASSERT_LT(plain_bytes, world_.device_bytes() + 4 * kLayerBytes);
  world_.ResetPeak();
  const auto forward = [&](const Tensors&) { return branches(/*taps=*/true); };
  session_->ComputeLayerGradientsAndEval(forward, LayerNames(kLayers), {x}, Target());
  EXPECT_LE(world_.peak_device_bytes(), plain_bytes + 2 * kLayerBytes + 16 * 1024);
}

TEST_F(AttributionTest, InAnOffloadScopeWhatTheGraphSavesLeavesAsWell) {
  constexpr int kLayers = 12;
  const Tensor x = Make(1).requires_grad_();
  const auto forward = [&](bool taps) {
    const OffloadScope scope(world_.session());
    return Chain(x, kLayers, taps);
  };
  world_.ResetPeak();
  forward(/*taps=*/false).sum().backward();
  x.mutable_grad() = Tensor();
  const uint64_t offloaded = world_.QuietStats().offloaded;
  const uint64_t plain_bytes = world_.peak_device_bytes();
  ASSERT_LT(plain_bytes, world_.device_bytes() + kLayers * kLayerBytes);
  world_.ResetPeak();
  session_->ComputeLayerGradientsAndEval([&](const Tensors&) { return forward(/*taps=*/true); },
                                         LayerNames(kLayers), {}, Target());
  EXPECT_LE(world_.peak_device_bytes(), plain_bytes + 2 * kLayerBytes + 4096);
  const OffloadStats stats = world_.QuietStats();
  EXPECT_EQ(stats.offloaded, 2 * offloaded);
  EXPECT_GT(stats.unpacked, offloaded);
}

TEST_F(AttributionTest, AMemoryTargetIsForWhatTheGraphSavesAndForWhatIsCaptured) {
  constexpr int kLayers = 16;
  const Tensor x = Make(1).requires_grad_();
  OffloadOptions offload = SmallWindows();
  offload.eviction_window_bytes = OffloadOptions::kAutoWindow;
  offload.prefetch_window_bytes = OffloadOptions::kAutoWindow;
  offload.memory_target_bytes = world_.device_bytes() + 10 * kLayerBytes;
  const auto session = world_.NewSession(offload);
  const auto forward = [&](const Tensors& in) {
    const OffloadScope scope(session);
    return Chain(in[0], kLayers, /*taps=*/true);
  };
  const std::vector<LayerResult> plain = ComputeChain(kLayers, x);
  EXPECT_GT(world_.peak_device_bytes(), offload.memory_target_bytes);
  for (int step = 0; step < 4; ++step) {
    ASSERT_TRUE(Soon([&] { return world_.device_bytes() <= 2 * kLayerBytes; }));
    world_.ResetPeak();
    const auto layers =
        session_->ComputeLayerGradientsAndEval(forward, LayerNames(kLayers), {x}, Target());
    EXPECT_LE(world_.peak_device_bytes(), offload.memory_target_bytes) << "step " << step;
    for (int layer = 0; layer < kLayers; ++layer) {
      EXPECT_TRUE(SameBytes(layers[layer].tensors[0].gradient, plain[layer].tensors[0].gradient));
    }
  }
}

TEST_F(AttributionTest, WhileTheResultIsHeldTheDeviceHoldsNothingOfTheGraph) {
  const Tensor x = Make(1);
  const uint64_t before_bytes = world_.device_bytes();
  const auto layers =
      LayerGradientXActivation(*session_, TappedChain(4), LayerNames(4), {x}, Target());
  EXPECT_TRUE(Soon([&] { return world_.device_bytes() == before_bytes; }));
  EXPECT_EQ(layers[3].tensors[0].numel(), kSide * kSide);
}

TEST_F(AttributionTest, WhatIsOnItsWayHoldsTwoCapturesAndNothingOfTheGraphOrTheProgram) {
  constexpr int kLayers = 6;
  const Tensor x = Make(1).requires_grad_(), frozen = Make(2);
  const auto forward = [&](const Tensors& in) {
    // Backward stops at the layers, so it frees nothing of this part of the graph.
    const Tensor ahead = Chain(in[0], kLayers, /*taps=*/false).unsqueeze(1) + in[0];
    return Chain(ahead + Tap("frozen", frozen), kLayers, /*taps=*/true);
  };
  std::vector<std::string> names = LayerNames(kLayers);
  names.push_back("frozen");
  const auto copies = session_->NewCopies();
  const auto start = [&] { return StartGradients(copies, forward, names, {x}, Target()); };
  const std::vector<LayerResult> expected = start().Wait();
  const uint64_t before_bytes = world_.device_bytes();
  PendingLayers first = start();
  EXPECT_FALSE(frozen.requires_grad());
  EXPECT_TRUE(Soon([&] { return world_.device_bytes() <= before_bytes + 2 * kLayerBytes; }));
  PendingLayers second = start();
  EXPECT_TRUE(Soon([&] { return world_.device_bytes() <= before_bytes + 2 * kLayerBytes; }));
  for (PendingLayers* pending : {&first, &second}) {
    const std::vector<LayerResult> layers = pending->Wait();
    for (size_t i = 0; i < names.size(); ++i) {
      EXPECT_TRUE(SameBytes(layers[i].tensors[0].activation, expected[i].tensors[0].activation));
      EXPECT_TRUE(SameBytes(layers[i].tensors[0].gradient, expected[i].tensors[0].gradient));
    }
  }
}

TEST_F(AttributionTest, ResultsAreInPinnedMemoryOfTheSharedPoolAndOutliveTheSession) {
  const uint64_t before_bytes = world_.session()->GetAllocatorStats().requested_bytes.current;
  std::vector<LayerResult> layers = ComputeChain(2, Make(1));
  EXPECT_EQ(world_.session()->GetAllocatorStats().requested_bytes.current,
            before_bytes + 4 * kLayerBytes);
  const double sum = layers[0].tensors[0].gradient.sum().item<double>();
  session_.reset();
  EXPECT_EQ(layers[0].tensors[0].gradient.sum().item<double>(), sum);
  layers.clear();
  world_.ExpectNothingLeft();
}

TEST_F(AttributionTest, OfAPartOfALargeGradientThePartAloneLeaves) {
  // Backward of cat gives each input a view of the whole gradient's columns.
  const auto forward = [&](const Tensors& in) {
    const Tensor all = at::cat({Tap("left", in[0] * 2), in[0]}, 1);
    return (all * all).sum(1);
  };
  const auto layers =
      session_->ComputeLayerGradientsAndEval(forward, {"left"}, {Make(1)}, Target());
  const LayerTensor& left = layers[0].tensors[0];
  EXPECT_TRUE(SameBytes(left.gradient, left.activation * 2));
  EXPECT_EQ(world_.session()->GetAllocatorStats().requested_bytes.current, 2 * kLayerBytes);
}

// Every copy stalls for 10 ms of device time; reading its host memory earlier faults.
EmulatedOptions SlowAndProtected() {
  EmulatedOptions options = SlowCopies();
  options.protect_host_pages = true;
  return options;
}

class SlowAttributionTest : public AttributionTest {
 protected:
  SlowAttributionTest() : AttributionTest(SlowAndProtected()) {}
};

TEST_F(SlowAttributionTest, NeitherForwardNorBackwardWaitsForACopyOnTheHost) {
  EmulatedMachine& machine = world_.machine();
  double forward_ms = 0, begin_ms = 0;
  const auto forward = [&](const Tensors& in) {
    begin_ms = machine.now_ms();
    const Tensor y = Chain(in[0], 8, /*taps=*/true);
    forward_ms = machine.now_ms() - begin_ms;
    return y;
  };
  const auto layers =
      session_->ComputeLayerGradientsAndEval(forward, LayerNames(8), {Make(1)}, Target());
  EXPECT_LT(forward_ms, 10);
  EXPECT_GT(machine.now_ms() - begin_ms, 100) << "the copies were stuck";
  EXPECT_TRUE(at::allclose(layers[7].tensors[0].gradient, 2 * layers[7].tensors[0].activation));
}

TEST_F(SlowAttributionTest, BesideOneLargeLayerSmallOnesHaveRoomForOneOfThem) {
  const Tensor x = Make(1), small = x.narrow(0, 0, kSide / 16).contiguous();
  const uint64_t before_bytes = world_.device_bytes();
  const auto forward = [&](const Tensors&) {
    Tap("layer0", x * 2);
    world_.ResetPeak();
    for (int layer = 1; layer < 14; ++layer) Tap("layer" + std::to_string(layer), small * layer);
    return x.sum(1);
  };
  session_->EvalLayers(forward, LayerNames(14), {x});
  // The large copy, a small one that waits, and a value that was just computed.
  EXPECT_LE(world_.peak_device_bytes(), before_bytes + kLayerBytes + kLayerBytes / 4);
}

TEST_F(SlowAttributionTest, OfSmallLayersAsManyWaitForTheirCopiesAsTheTwoLargestWouldTake) {
  EmulatedMachine& machine = world_.machine();
  const std::shared_ptr<Device> device = machine.device(0);
  const EventHandle begin = device->CreateTimedEvent().value();
  const EventHandle end = device->CreateTimedEvent().value();
  const Tensor x = Make(1), small = x.narrow(0, 0, kSide / 8).contiguous();
  const auto forward = [&](const Tensors&) {
    EXPECT_TRUE(device->RecordEvent(begin, machine.default_stream(0)).ok());
    Tap("layer0", x * 2);
    Tap("layer1", x * 3);
    for (int layer = 2; layer < 10; ++layer) Tap("layer" + std::to_string(layer), small * layer);
    EXPECT_TRUE(device->RecordEvent(end, machine.default_stream(0)).ok());
    return x.sum(1);
  };
  world_.ResetPeak();
  const uint64_t before_bytes = world_.device_bytes();
  session_->EvalLayers(forward, LayerNames(10), {x});
  // A value that was just computed, and two pending copies.
  EXPECT_LE(world_.peak_device_bytes(), before_bytes + 3 * kLayerBytes);
  EXPECT_NEAR(device->ElapsedMs(begin, end).value(), 10, 1)
      << "the first small one waits for the first large one";
}

// The host needs 4 ms for a product of two layers.
EmulatedOptions SlowHost() {
  EmulatedOptions options = SlowCopies(/*stall_ms=*/10);
  options.preset.host_memory_gb_per_s = 3 * 128 * 128 * 4 / 4e6;
  return options;
}

class SlowHostTest : public AttributionTest {
 protected:
  SlowHostTest() : AttributionTest(SlowHost()) {}
};

TEST_F(SlowHostTest, ProductsAreComputedWhileLaterGradientsAreOnTheirWay) {
  constexpr int kLayers = 8;
  EmulatedMachine& machine = world_.machine();
  const auto run = [&](bool multiplies) {
    const double begin_ms = machine.now_ms();
    LayerGradientXActivation(*session_, TappedChain(kLayers), LayerNames(kLayers), {Make(1)},
                             Target());
    if (multiplies) return machine.now_ms() - begin_ms;
    const double between_ms = machine.now_ms();
    ComputeChain(kLayers, Make(1));
    return machine.now_ms() - between_ms;
  };
  const double copies_ms = run(/*multiplies=*/false);
  EXPECT_GT(copies_ms, 2 * kLayers * 10);
  EXPECT_NEAR(run(/*multiplies=*/true), copies_ms + 4, 0.5) << "the last one is alone";
}

// A kernel takes 1 ms and a copy 1.5 ms more; the host needs 2 ms per step to sum a layer.
EmulatedOptions SlowEverything() {
  EmulatedOptions options = SlowCopies(/*stall_ms=*/1.5);
  options.preset.launch_us = 1000;
  options.preset.host_memory_gb_per_s = 2 * 128 * 128 * 4 / 2e6;
  return options;
}

class SlowPassesTest : public AttributionTest {
 protected:
  SlowPassesTest() : AttributionTest(SlowEverything()) {}
};

TEST_F(SlowPassesTest, APassIsComputedWhileTheOneBeforeArrivesAndIsAddedUp) {
  constexpr int kLayers = 4;
  const Tensor x = Make(1);
  int passes = 0;
  const auto forward = [&](const Tensors& in) {
    ++passes;
    return Chain(in[0], kLayers, /*taps=*/true);
  };
  PathOptions options;
  options.n_steps = 40;
  options.device_budget_bytes = world_.device_bytes() + 40 * kLayerBytes;
  const auto run = [&] {
    return LayerConductance(*session_, forward, LayerNames(kLayers), {x}, Target(), options);
  };
  run();
  passes = 0;
  EmulatedMachine& machine = world_.machine();
  machine.ResetTimeStats(0);
  const double begin_ms = machine.now_ms();
  run();
  const double time_ms = machine.now_ms() - begin_ms;
  const TimeStats times = machine.time_stats(0);
  ASSERT_GT(passes, 4);
  ASSERT_GT(times.host_arithmetic_ms, 0.3 * times.compute_busy_ms);
  ASSERT_GT(times.d2h_busy_ms, 0.2 * times.compute_busy_ms);
  EXPECT_LT(time_ms, times.compute_busy_ms + 2 * times.host_arithmetic_ms / passes)
      << "the last pass alone has nothing beside it";
}

TEST_F(SlowPassesTest, AValueThatNobodyElseHasLeavesWhileItIsCopiedForTheModel) {
  const torch::nn::Sequential body((torch::nn::Tanh()));
  const SequentialTaps taps(body, "body.");
  const Tensor x = Make(1);
  const auto tap = [](const Tensors& in) { return Tap("layer", at::tanh(in[0])); };
  const auto module = [&](const Tensors& in) { return body.ptr()->forward(in[0]); };
  const auto kept = [](const Tensors& in) {
    const Tensor y = at::tanh(in[0]);
    Tap("layer", y);
    return y;
  };
  const auto time_ms = [&](const AttributedForward& forward, const std::string& layer) {
    session_->EvalLayers(forward, {layer}, {x});
    const double begin_ms = world_.machine().now_ms();
    session_->EvalLayers(forward, {layer}, {x});
    return world_.machine().now_ms() - begin_ms;
  };
  constexpr double kKernelAndCopyMs = 1 + 1.5;
  EXPECT_NEAR(time_ms(tap, "layer"), kKernelAndCopyMs, 0.2);
  EXPECT_NEAR(time_ms(module, "body.0"), kKernelAndCopyMs, 0.2);
  EXPECT_NEAR(time_ms(kept, "layer"), kKernelAndCopyMs + 1, 0.2) << "the copy comes first";
}

// Captures values that the copy reads directly, while device call number `fails_at` fails (0:
// none). Returns the number of device calls.
uint64_t LeaveThemselves(uint64_t fails_at, bool keep_on_device, bool* failed) {
  EmulatedOptions machine = MachineOptions();
  if (fails_at > 0) machine.faults.calls.push_back({.at = fails_at});
  const OffloadOptions offload = SmallWindows();
  EmuWorld world(machine, offload);
  constexpr int kLayers = 4;
  const Tensor host = at::arange(64 * 64, at::kFloat).view({64, 64});
  const auto forward = [&](const Tensors& in) {
    Tensor y = in[0];
    for (int layer = 0; layer < kLayers; ++layer) {
      y = Tap("layer" + std::to_string(layer), y * 2);
      y.add_(1);  // changes the model's tensor, not the captured one
    }
    return y.sum(1);
  };
  LayerOptions options;
  options.keep_on_device = keep_on_device;
  *failed = false;
  try {
    const auto session =
        AttributionSession::Create({offload.allocator, offload.engine}, world.backend()).value();
    const Tensor x = host.to(world.device());
    const auto layers =
        session->EvalLayers(forward, {"layer0", "layer1", "layer2", "layer3"}, {x}, options);
    Tensor expected = host * 2;
    for (const LayerResult& layer : layers) {
      EXPECT_TRUE(SameBytes(layer.tensors[0].activation.cpu(), expected));
      expected = (expected + 1) * 2;
    }
  } catch (const c10::Error&) {
    *failed = true;
  }
  EXPECT_TRUE(Soon([&] { return world.device_bytes() == 0; }));
  return world.machine().calls(DeviceCall::kAny);
}

TEST(AttributionFaults, AValueThatLeavesItselfIsRightOrAnErrorWhicheverCallOfTheDeviceFails) {
  for (const bool keep_on_device : {false, true}) {
    SCOPED_TRACE(keep_on_device);
    bool has_failed = false;
    const uint64_t calls = LeaveThemselves(0, keep_on_device, &has_failed);
    ASSERT_FALSE(has_failed);
    int failures = 0;
    for (uint64_t at = 1; at <= calls; ++at) {
      SCOPED_TRACE(at);
      LeaveThemselves(at, keep_on_device, &has_failed);
      failures += has_failed ? 1 : 0;
      if (::testing::Test::HasFailure()) return;
    }
    EXPECT_GT(failures, 8) << "of " << calls << " calls";
  }
}

OffloadOptions LittleHostMemory() {
  OffloadOptions options = SmallWindows();
  options.allocator.max_locked_bytes = 2 * kMiB;
  return options;
}

class FullHostTest : public AttributionTest {
 protected:
  FullHostTest() : AttributionTest(MachineOptions(), LittleHostMemory()) {}
};

TEST_F(FullHostTest, AResultWithoutRoomInHostMemoryIsOutOfMemoryAndLeavesNothing) {
  const uint64_t before_bytes = world_.device_bytes();
  const auto compute = [&](int layers) {
    session_->ComputeLayerGradientsAndEval(
        [&](const Tensors& in) { return Chain(in[0], layers, /*taps=*/true); }, LayerNames(layers),
        {Make(1)}, Target());
  };
  EXPECT_THROW(compute(40), c10::OutOfMemoryError) << "in forward";
  EXPECT_THROW(compute(24), c10::OutOfMemoryError) << "in backward";
  EXPECT_TRUE(Soon([&] { return world_.device_bytes() == before_bytes; }));
  compute(8);
}

}  // namespace
}  // namespace pinion::testing
