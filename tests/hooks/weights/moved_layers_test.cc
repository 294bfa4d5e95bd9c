// Programs that move a layer's weights to the device by hand, only while they are needed. The tests
// show why they fail, and that the same works with streamed weights. The programs follow the forum
// thread "Offload models to CPU using autograd.Function".

#include <ATen/core/Tensor.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <c10/core/Device.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/hooks/weights/weight_offloader.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/error_of.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/hooks/weights/streamed_net.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using at::Tensor;
using ::testing::HasSubstr;
using Tensors = std::vector<Tensor>;

class MovedLayersTest : public ::testing::Test {
 protected:
  std::unique_ptr<WeightOffloader> Attach(torch::nn::Module& module) {
    auto weights =
        WeightOffloader::Attach(module, world_.device(), world_.backend(), {.tier = SmallTier()});
    EXPECT_TRUE(weights.ok()) << weights.status();
    return *std::move(weights);
  }
  // As Python's Module.to, gradients included.
  static void Move(torch::nn::Module& module, c10::Device device) {
    module.to(device);
    for (Tensor& parameter : module.parameters()) {
      if (parameter.grad().defined()) parameter.mutable_grad() = parameter.grad().to(device);
    }
  }
  // The layer is on the device only while it computes.
  Tensor Moving(torch::nn::Linear& layer, const Tensor& x) {
    Move(*layer, world_.device());
    const Tensor y = layer(x.to(world_.device())).cpu();
    Move(*layer, at::kCPU);
    return y;
  }

  EmuWorld world_{MachineOptions(), SmallWindows()};
};

// The body of a Function of their own: forward keeps the output, backward asks for its gradients.
TEST_F(MovedLayersTest, AFunctionThatMovesItsLayerAsksForWeightsThatWereNotRecorded) {
  torch::nn::Linear layer(kWidth, kWidth);
  const Tensor x = Input().requires_grad_();
  const auto backward = [&x](const Tensor& y, const Tensor& weight) {
    return torch::autograd::grad({y}, {x, weight}, {at::ones_like(y)});
  };
  EXPECT_THAT(ErrorOf([&] { backward(Moving(layer, x), layer->weight); }),
              HasSubstr("of the differentiated Tensors appears to not have been used"));

  const Tensors expected = backward(layer(x), layer->weight);
  const auto weights = Attach(*layer);
  const Tensors grads = backward(layer(x.to(world_.device())), layer->weight);
  EXPECT_TRUE(AsOnCpu(grads[0], expected[0]));
  EXPECT_TRUE(SameBytes(grads[1].cpu(), expected[1]));
}

TEST_F(MovedLayersTest, ALayerThatMovesInItsForwardFindsItsGradientsElsewhereTheSecondTime) {
  torch::nn::Linear layer(kWidth, kWidth);
  Moving(layer, Input()).sum().backward();
  layer->zero_grad(/*set_to_none=*/false);
  EXPECT_THAT(ErrorOf([&] { Moving(layer, Input()).sum().backward(); }),
              AnyOf(HasSubstr("expects all tensors on one device"),
                    HasSubstr("all tensors to be on the same device")));

  const auto weights = Attach(*layer);
  Tensors grads;
  for (int backward = 0; backward < 2; ++backward) {
    layer(Input().to(world_.device())).sum().backward();
    weights->WaitForGradients();
    const Tensor master = weights->host_parameters()[0];
    grads.push_back(master.grad().clone());
    master.mutable_grad().zero_();
  }
  EXPECT_TRUE(AsOnCpu(grads[0], at::matmul(at::ones({kWidth, 8}), Input())));
  EXPECT_TRUE(SameBytes(grads[1], grads[0]));
}

TEST_F(MovedLayersTest, AModelThatMovesAwayBeforeBackwardIsOnTheDeviceAllTheSame) {
  constexpr int kLayers = 8;
  const Tensors expected = [&] {
    Net plain(kLayers);
    plain->forward(Input()).sum().backward();
    return Tensors{plain->parameters()[0].grad(), plain->parameters().back().grad()};
  }();
  {
    Net net(kLayers);
    Move(*net, world_.device());
    const Tensor loss = net->forward(Input().to(world_.device())).cpu().sum();
    Move(*net, at::kCPU);
    EXPECT_THAT(world_.Synchronize(), IsOk());
    EXPECT_GE(world_.device_bytes(), (kLayers - 1) * kUnitBytes) << "the graph has saved them";
  }
  Net net(kLayers);
  const auto weights = Attach(*net);
  const Tensor loss = net->forward(Input().to(world_.device())).cpu().sum();
  EXPECT_LE(weights->GetStats().resident_bytes, 2 * kUnitBytes);
  const uint64_t fetches = weights->GetStats().fetches;
  loss.backward();
  EXPECT_EQ(weights->GetStats().fetches, fetches + 5) << "two are there, the first needs none";
  weights->WaitForGradients();
  EXPECT_TRUE(AsOnCpu(weights->host_parameters()[0].grad(), expected[0]));
  EXPECT_TRUE(AsOnCpu(weights->host_parameters().back().grad(), expected[1]));
}

}  // namespace
}  // namespace pinion::testing
