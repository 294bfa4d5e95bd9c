#include "pinion/bench/peers/graph_offload.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/bench/peers/graph_plan.h"
#include "pinion/bench/peers/peer_stats.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/tests/bench/peers/peer_steps.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace graph_offload_test {

constexpr NetShape kNet = {.layers = 6, .tokens = 64, .channels = 32};

GraphOptions OptionsFor(const TestNet& net, const GraphLimits& limits = {}) {
  GraphOptions options;
  options.limits = limits;
  constexpr size_t kParametersPerLayer = 10;
  const std::vector<at::Tensor>& parameters = net.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (i >= kNet.layers * kParametersPerLayer) {
      options.inputs.push_back(parameters[i]);
    } else {
      options.layers.resize(i / kParametersPerLayer + 1);
      options.layers.back().push_back(parameters[i]);
    }
  }
  return options;
}

std::shared_ptr<GraphOffload> NewGraph(const TestNet& net, c10::Device device,
                                       const GraphLimits& limits = {}) {
  return std::make_shared<GraphOffload>(OptionsFor(net, limits), device);
}

// A detected race aborts the test.
class GraphOffloadInAnyOrderTest : public ::testing::TestWithParam<EffectSchedule> {
 protected:
  EmuWorld world_{MachineOptions(GetParam())};
};

INSTANTIATE_TEST_SUITE_P(, GraphOffloadInAnyOrderTest,
                         ::testing::Values(EffectSchedule::kEarly, EffectSchedule::kLate,
                                           EffectSchedule::kRandom));

TEST_P(GraphOffloadInAnyOrderTest, GradientsOfATransformerAreThoseWithoutIt) {
  const TestNet net(world_.device(), at::kFloat, kNet);
  const Gradients plain = TrainStepWith(net, nullptr);
  for (const GraphLimits& limits :
       {GraphLimits{}, GraphLimits{.defer_n_layers = 0, .prefetch_n_layers = 0},
        GraphLimits{.defer_n_layers = 2, .prefetch_n_layers = 3}}) {
    const auto graph = NewGraph(net, world_.device(), limits);
    for (int step = 0; step < 4; ++step) ExpectSameGradients(plain, TrainStepWith(net, graph));
    EXPECT_GT(graph->GetStats().fetched_bytes, 0u);
  }
}

TEST_P(GraphOffloadInAnyOrderTest, AStepMayBeGivenUpInForward) {
  const TestNet net(world_.device(), at::kFloat, kNet);
  const auto graph = NewGraph(net, world_.device(), {.defer_n_layers = 8});
  TrainStepWith(net, graph);
  const SavedTensorScope scope(graph);
  net.Loss();
  EXPECT_GT(graph->GetStats().offloaded_bytes, 0u);
}

TEST_P(GraphOffloadInAnyOrderTest, AStepMayBeGivenUpInBackward) {
  const TestNet net(world_.device(), at::kFloat, kNet);
  const auto graph = NewGraph(net, world_.device(), {.prefetch_n_layers = 8});
  TrainStepWith(net, graph);
  const SavedTensorScope scope(graph);
  torch::autograd::grad({net.Loss()}, {net.parameters().back()});
  EXPECT_GT(graph->GetStats().fetched_bytes, 0u);
}

TEST_P(GraphOffloadInAnyOrderTest, GradientsOfConvolutionsAreThoseWithoutIt) {
  const ConvNet net(world_.device());
  net.Loss().backward();
  const std::vector<at::Tensor> plain = net.TakeGradients();
  GraphOptions options;
  for (const at::Tensor& parameter : net.parameters()) options.layers.push_back({parameter});
  options.inputs = {net.input()};
  const auto graph = std::make_shared<GraphOffload>(options, world_.device());
  for (int step = 0; step < 3; ++step) {
    at::Tensor loss;
    {
      const SavedTensorScope scope(graph);
      loss = net.Loss();
    }
    loss.backward();
    const std::vector<at::Tensor> gradients = net.TakeGradients();
    for (size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(SameBytes(plain[i], gradients[i])) << i;
  }
  EXPECT_GT(graph->GetStats().fetched_bytes, 0u);
}

// Runs a step that copies nothing to the CPU itself.
void RunStep(
    const TestNet& net, const std::shared_ptr<GraphOffload>& graph,
    const std::function<at::Tensor(const at::Tensor&)>& after = [](const at::Tensor& loss) {
      return loss;
    }) {
  at::Tensor loss;
  {
    const SavedTensorScope scope(graph);
    loss = after(net.Loss());
  }
  loss.backward();
}

// Returns the copies and modelled stalls of a step after the first ones.
TimeStats LaterStep(EmuWorld& world, const TestNet& net, const GraphLimits& limits) {
  const auto graph = NewGraph(net, world.device(), limits);
  for (int step = 0; step < 2; ++step) RunStep(net, graph);
  EXPECT_TRUE(world.Synchronize().ok());
  world.machine().ResetTimeStats(0);
  RunStep(net, graph);
  EXPECT_TRUE(world.Synchronize().ok());
  return world.machine().time_stats(0);
}

class GraphOffloadTest : public ::testing::Test {
 protected:
  EmuWorld world_;
  const TestNet net_{world_.device(), at::kFloat, kNet};
};

TEST_F(GraphOffloadTest, NothingLeavesInTheFirstStep) {
  const auto graph = NewGraph(net_, world_.device());
  TrainStepWith(net_, graph);
  EXPECT_EQ(graph->GetStats().offloaded_bytes, 0u);
}

TEST_F(GraphOffloadTest, WhatItSaysThatItMovesIsWhatTheLinkHasMoved) {
  const auto graph = NewGraph(net_, world_.device());
  RunStep(net_, graph);
  ASSERT_TRUE(world_.Synchronize().ok());
  world_.machine().ResetTimeStats(0);
  RunStep(net_, graph);
  ASSERT_TRUE(world_.Synchronize().ok());
  const TimeStats moved = world_.machine().time_stats(0);
  EXPECT_GT(graph->GetStats().offloaded_bytes, 0u);
  EXPECT_EQ(graph->GetStats().offloaded_bytes, moved.d2h_bytes);
  EXPECT_EQ(graph->GetStats().fetched_bytes, moved.h2d_bytes);
  EXPECT_EQ(moved.d2h_bytes, moved.h2d_bytes);
}

TEST_F(GraphOffloadTest, NoMoreLeavesThanTheBudgetAllows) {
  const uint64_t all = LaterStep(world_, net_, {}).d2h_bytes;
  const uint64_t some = LaterStep(world_, net_, {.host_budget_bytes = all / 2}).d2h_bytes;
  EXPECT_LE(some, all / 2);
  EXPECT_GT(some, all / 3);
}

TEST_F(GraphOffloadTest, ThePeakOfDeviceMemoryFalls) {
  const auto graph = NewGraph(net_, world_.device());
  const uint64_t before = world_.device_bytes();
  const auto peak_of_a_step = [&] {
    world_.ResetPeak();
    TrainStepWith(net_, graph);
    return world_.peak_device_bytes() - before;
  };
  const uint64_t plain = peak_of_a_step();
  EXPECT_LT(peak_of_a_step(), plain * 2 / 3);
}

TEST_F(GraphOffloadTest, AShorterDistanceBetweenCopyAndWaitTakesLessMemory) {
  const auto peak = [&](int defer_n_layers) {
    const auto graph = NewGraph(net_, world_.device(), {.defer_n_layers = defer_n_layers});
    TrainStepWith(net_, graph);
    world_.ResetPeak();
    TrainStepWith(net_, graph);
    return world_.peak_device_bytes();
  };
  const uint64_t one = peak(1);
  EXPECT_LT(one, peak(3));
  EXPECT_LE(peak(0), one);
}

TEST(GraphOffloadTimeTest, FetchingALayerAheadStallsLess) {
  EmulatedOptions slow_link = MachineOptions();
  slow_link.preset.link.h2d_gb_per_s = slow_link.preset.link.h2d_duplex_gb_per_s = 1;
  EmuWorld world(slow_link);
  const TestNet net(world.device(), at::kFloat, kNet);
  EXPECT_LT(LaterStep(world, net, {.prefetch_n_layers = 1}).stalled_on_copies_ms,
            LaterStep(world, net, {.prefetch_n_layers = 0}).stalled_on_copies_ms);
}

TEST_F(GraphOffloadTest, OnlyWithMoreThanOneLayerAheadAreTensorsFetchedWhenBackwardBegins) {
  for (const int prefetch_n_layers : {1, 2}) {
    const auto graph = NewGraph(net_, world_.device(), {.prefetch_n_layers = prefetch_n_layers});
    RunStep(net_, graph, [](const at::Tensor& loss) { return loss.square(); });
    uint64_t fetched_bytes = 0;
    RunStep(net_, graph, [&](const at::Tensor& loss) {
      return Probe(loss, {loss}, [&](const at::Tensor& grad, const UnpackSaved& unpack) {
        unpack();
        fetched_bytes = graph->GetStats().fetched_bytes;
        return grad;
      });
    });
    EXPECT_EQ(fetched_bytes > 0, prefetch_n_layers > 1);
  }
}

// Buffers are reused while a copy still uses them: the next use is ordered after it on the device.
TEST(GraphOffloadPoolTest, TheThirdStepPinsNothing) {
  EmuWorld world(SlowCopies());
  const TestNet net(world.device(), at::kFloat, kNet);
  const auto graph = NewGraph(net, world.device());
  RunStep(net, graph);
  RunStep(net, graph);
  const uint64_t pins = world.machine().calls(DeviceCall::kPin);
  EXPECT_GT(pins, 0u);
  RunStep(net, graph);
  EXPECT_EQ(world.machine().calls(DeviceCall::kPin), pins);
}

TEST_F(GraphOffloadTest, AStepWithTensorsOfOtherSizesThrows) {
  const auto graph = NewGraph(net_, world_.device());
  RunStep(net_, graph);
  NetShape shorter = kNet;
  shorter.tokens = 32;
  const SavedTensorScope scope(graph);
  EXPECT_THROW(TestNet(world_.device(), at::kFloat, shorter).Loss(), c10::Error);
}

TEST_F(GraphOffloadTest, AStepThatSavesMoreThanTheFirstOneThrows) {
  const auto graph = NewGraph(net_, world_.device());
  TrainStepWith(net_, graph);
  const SavedTensorScope scope(graph);
  const at::Tensor loss = net_.Loss();
  EXPECT_THROW(loss.exp(), c10::Error);
}

TEST_F(GraphOffloadTest, AStepThatSavesLessThanTheFirstOneThrows) {
  const auto graph = NewGraph(net_, world_.device());
  {
    at::Tensor longer;
    {
      const SavedTensorScope scope(graph);
      longer = net_.Loss().exp();
    }
    longer.backward();
    TakeGradients(net_, longer);
  }
  at::Tensor loss;
  {
    const SavedTensorScope scope(graph);
    loss = net_.Loss();
  }
  EXPECT_THROW(loss.backward(), c10::Error);
}

}  // namespace graph_offload_test
}  // namespace pinion::testing
