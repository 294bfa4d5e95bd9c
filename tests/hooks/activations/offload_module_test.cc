// Checks that a scope with a module keeps the module's parameters and buffers on the device, by
// storage, and may offload all other saved tensors.

#include <ATen/core/Tensor.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace offload_module_test {

constexpr int64_t kWidth = 32;

// Two layers, the first one frozen, and a mask that is a buffer.
class MaskedLayersImpl : public torch::nn::Module {
 public:
  MaskedLayersImpl()
      : frozen_(register_module("frozen", torch::nn::Linear(kWidth, kWidth))),
        trained_(register_module("trained", torch::nn::Linear(kWidth, kWidth))),
        mask_(register_buffer("mask", at::ones({kWidth, kWidth}))) {
    for (at::Tensor& parameter : frozen_->parameters()) parameter.requires_grad_(false);
  }

  at::Tensor forward(const at::Tensor& x) {
    return at::sum(at::mul(trained_->forward(frozen_->forward(x)), mask_));
  }

  const at::Tensor& weight() const { return trained_->weight; }

 private:
  torch::nn::Linear frozen_;
  torch::nn::Linear trained_;
  at::Tensor mask_;
};
TORCH_MODULE(MaskedLayers);

class OffloadModule : public OffloadFixture {
 protected:
  OffloadModule() { model_->to(world_.device()); }

  // Returns what `forward` returns in a scope that knows the module.
  template <typename Forward>
  at::Tensor InScopeWith(const torch::nn::Module& module, const Forward& forward) {
    const OffloadScope scope(world_.session(), module);
    return forward();
  }

  at::Tensor input() {
    return ActivationValues({kWidth, kWidth}).to(world_.device()).requires_grad_(true);
  }

  MaskedLayers model_;
};

TEST_F(OffloadModule, FrozenParametersAndBuffersStayToo) {
  const at::Tensor loss = InScopeWith(*model_, [&] {
    return model_->forward(Activation(input(), {kWidth, kWidth}));
  });
  EXPECT_EQ(stats().kept_parameter, 3u);  // two weights and the mask
  EXPECT_EQ(stats().kept_held, 0u);
  EXPECT_GT(stats().offloaded, 0u);
}

// Without parameters in the module, no input is taken for one, with or without gradients.
TEST_F(OffloadModule, AScopeOfAModuleWithoutParametersKnowsThatItHasNone) {
  OffloadOptions options = SmallWindows(1);
  options.offload_leaves = true;
  const auto session = world_.NewSession(options);
  const auto saved_with = [&](const torch::nn::Module* module) {
    const OffloadStats before = session->GetStats();
    const OffloadScope scope =
        module == nullptr ? OffloadScope(session) : OffloadScope(session, *module);
    Observe(input(), {input()}, &seen_);
    const OffloadStats after = session->GetStats();
    return std::pair(after.kept_parameter - before.kept_parameter,
                     after.offloaded - before.offloaded);
  };
  EXPECT_EQ(saved_with(nullptr), std::pair(uint64_t{1}, uint64_t{0}));
  const torch::nn::GELU without_parameters;
  EXPECT_EQ(saved_with(without_parameters.get()), std::pair(uint64_t{0}, uint64_t{1}));
  EXPECT_EQ(saved_with(model_.get()), std::pair(uint64_t{0}, uint64_t{1}));
}

TEST_F(OffloadModule, ABufferWithoutAStorageIsNothingToKeep) {
  torch::nn::Module module;
  module.register_buffer("sparse",
                         at::sparse_coo_tensor(at::zeros({1, 1}, at::kLong), at::ones({1}), {9}));
  module.register_buffer("none", at::Tensor());
  const at::Tensor y = InScopeWith(module, [&] {
    return Observe(input(), {Activation(input(), {kWidth, kWidth})}, &seen_);
  });
  EXPECT_EQ(stats().offloaded, 1u);
  y.sum().backward();
}

// As in attribution: the input requires a gradient, and a layer saves a view of it. The input is no
// parameter, but its owner keeps it on the device.
TEST_F(OffloadModule, AnInputThatRequiresAGradientIsNotCopiedThroughItsViews) {
  const at::Tensor x = input();
  const at::Tensor loss =
      InScopeWith(*model_, [&] { return at::sum(at::mul(x.view({-1}), x.view({-1}))); });
  EXPECT_EQ(stats().kept_held, 1u);
  EXPECT_EQ(stats().offloaded, 0u);
  EXPECT_EQ(stats().evicted_not_freed, 0u);
}

TEST_F(OffloadModule, GradientsOfAModuleAreBitwiseTheSame) {
  const at::Tensor x = input();
  const auto gradient = [&](bool offload) {
    const auto forward = [&] { return model_->forward(at::mul(x, 2)); };
    const at::Tensor loss = offload ? InScopeWith(*model_, forward) : forward();
    loss.backward();
    const at::Tensor grad = model_->weight().grad().cpu();
    model_->zero_grad();
    x.mutable_grad().reset();
    return grad;
  };
  const at::Tensor plain = gradient(false);
  EXPECT_TRUE(SameBytes(plain, gradient(true)));
  EXPECT_GT(stats().fetched_bytes, 0u);
}

}  // namespace offload_module_test
}  // namespace pinion::testing
