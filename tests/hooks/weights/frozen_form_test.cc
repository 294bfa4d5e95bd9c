// Frozen weights that rest narrower than the device uses them: the values are those of the form,
// and a model computes with them what it computes with the same values at full width.

#include "pinion/hooks/weights/frozen_form.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/weights/weight_offloader.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/error_of.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace frozen_form_test {

using at::Tensor;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kWidth = 64;

Tensor Waves(at::IntArrayRef shape, double seed) {
  return at::sin(at::arange(c10::multiply_integers(shape), at::kFloat) * 0.37 + seed).view(shape);
}

// What the weight is in the form, value by value.
Tensor ValuesIn(FrozenForm form, const Tensor& weight) {
  if (form == FrozenForm::kBFloat16) return weight.to(at::kBFloat16).to(weight.dtype());
  const Tensor flat = weight.to(at::kFloat).contiguous().view({-1}).clone();
  float* const values = flat.data_ptr<float>();
  for (int64_t begin = 0; begin < flat.numel(); begin += 128) {
    const int64_t end = std::min<int64_t>(begin + 128, flat.numel());
    float most = 0;
    for (int64_t i = begin; i < end; ++i) most = std::max(most, std::abs(values[i]));
    const float scale = most / 127;
    for (int64_t i = begin; i < end; ++i) {
      const float level = scale == 0 ? 0 : std::nearbyint(values[i] / scale);
      values[i] = static_cast<float>(static_cast<int>(level)) * scale;  // an integer has no -0
    }
  }
  return flat.view(weight.sizes()).to(weight.dtype());
}

// There and back on the host.
Tensor RoundTripIn(FrozenForm form, const Tensor& weight) {
  const RestingForm resting = RestingFormOf(weight, form);
  const Tensor bytes = at::zeros({static_cast<int64_t>(resting.resting_bytes())}, at::kByte);
  Tensor back = at::zeros_like(weight);
  EXPECT_TRUE(Narrow({weight.storage()}, resting, {bytes.storage()}).ok());
  Widen({bytes.storage()}, resting, {back.storage()});
  return back;
}

TEST(FrozenForm, EachFormHasTheValuesThatItsDefinitionGives) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    for (const int64_t values : {1, 5, 127, 128, 129, 1000}) {
      const Tensor weight = (Waves({values}, 1) * 3).to(type);
      EXPECT_TRUE(SameBytes(RoundTripIn(FrozenForm::kInt8Blocks, weight),
                            ValuesIn(FrozenForm::kInt8Blocks, weight)))
          << type << " " << values;
      EXPECT_TRUE(SameBytes(RoundTripIn(FrozenForm::kBFloat16, weight),
                            type == at::kHalf ? weight : ValuesIn(FrozenForm::kBFloat16, weight)))
          << type << " " << values;
    }
  }
}

TEST(FrozenForm, ABlockIsAsWrongAsHalfALevelOfItsLargestValue) {
  Tensor weight = Waves({4 * 128}, 2);
  weight[0] = 1000;  // spoils its own block alone
  const Tensor error = (RoundTripIn(FrozenForm::kInt8Blocks, weight) - weight).abs();
  EXPECT_LE(error.slice(0, 0, 128).max().item<float>(), 1000.f / 127 / 2 * 1.001f);
  EXPECT_LE(error.slice(0, 128).max().item<float>(), 1.f / 127 / 2 * 1.001f);
}

TEST(FrozenForm, ZerosStayZeroAndTinyValuesDoNotBecomeNan) {
  Tensor weight = at::zeros({200});
  weight[150] = 1e-44;
  const Tensor back = RoundTripIn(FrozenForm::kInt8Blocks, weight);
  EXPECT_TRUE(back.isfinite().all().item<bool>());
  EXPECT_TRUE(SameBytes(back.slice(0, 0, 128), at::zeros({128})));
}

TEST(FrozenForm, WhatIsNoWiderThanTheFormRestsAsItIs) {
  const Tensor levels = at::arange(100).to(at::kInt);
  EXPECT_EQ(RestingFormOf(levels, FrozenForm::kInt8Blocks).resting_bytes(), 400u);
  EXPECT_TRUE(SameBytes(RoundTripIn(FrozenForm::kInt8Blocks, levels), levels));
  const Tensor narrow = Waves({100}, 3).to(at::kBFloat16);
  EXPECT_EQ(RestingFormOf(narrow, FrozenForm::kBFloat16).form, FrozenForm::kAsIs);
}

TEST(FrozenForm, ItTakesAQuarterOrAHalfOfFloat32) {
  const Tensor weight = Waves({128, 128}, 4);
  EXPECT_EQ(RestingFormOf(weight, FrozenForm::kBFloat16).resting_bytes(), 2u * 128 * 128);
  EXPECT_EQ(RestingFormOf(weight, FrozenForm::kInt8Blocks).resting_bytes(), (128u + 4) * 128);
}

// A frozen base with a trained adapter beside it.
struct AdaptedImpl : torch::nn::Module {
  explicit AdaptedImpl(int64_t seed)
      : base(register_module("base", torch::nn::Linear(kWidth, kWidth))),
        down(register_module("down", torch::nn::Linear(kWidth, 4))),
        up(register_module("up", torch::nn::Linear(4, kWidth))) {
    const at::NoGradGuard no_grad;
    for (Tensor& parameter : parameters()) {
      parameter.copy_(Waves(parameter.sizes(), static_cast<double>(++seed)) * 0.2);
    }
    for (Tensor& parameter : base->parameters()) parameter.requires_grad_(false);
  }
  Tensor forward(const Tensor& x) { return x + at::tanh(base(x) + up(down(x))); }
  torch::nn::Linear base, down, up;
};

torch::nn::Sequential Adapted(int layers) {
  torch::nn::Sequential net;
  for (int layer = 0; layer < layers; ++layer) {
    net->push_back(std::make_shared<AdaptedImpl>(10 * layer));
  }
  return net;
}

// The same model with the form's values at full width.
torch::nn::Sequential AdaptedWithValuesIn(FrozenForm form, int layers) {
  torch::nn::Sequential net = Adapted(layers);
  const at::NoGradGuard no_grad;
  for (Tensor& parameter : net->parameters()) {
    if (!parameter.requires_grad()) parameter.copy_(ValuesIn(form, parameter));
  }
  return net;
}

class FrozenWeightsTest : public ::testing::Test {
 protected:
  WeightOptions Options(FrozenForm form, uint64_t window_bytes = 0) {
    return {.tier = SmallTier(), .window_bytes = window_bytes, .frozen_form = form};
  }
  std::unique_ptr<WeightOffloader> Attach(torch::nn::Module& module, FrozenForm form,
                                          uint64_t window_bytes = 0) {
    auto weights = WeightOffloader::Attach(module, world_.device(), world_.backend(),
                                           Options(form, window_bytes));
    EXPECT_TRUE(weights.ok()) << weights.status();
    return *std::move(weights);
  }
  Tensor X(double seed = 0) { return Waves({8, kWidth}, seed).to(world_.device()); }

  struct Trained {
    std::vector<Tensor> losses;
    WeightStats stats;
  };
  Trained Train(torch::nn::Sequential net, FrozenForm form) {
    const auto weights = Attach(*net, form);
    std::vector<Tensor> trained;
    for (const Tensor& parameter : weights->host_parameters()) {
      if (parameter.requires_grad()) trained.push_back(parameter);
    }
    torch::optim::SGD optimizer(trained, 0.1);
    Trained result;
    for (int step = 0; step < 4; ++step) {
      const Tensor loss = net->forward(X(step)).pow(2).mean();
      loss.backward();
      result.losses.push_back(loss.detach().cpu());
      weights->Step([&] { optimizer.step(); });
      weights->ZeroGrad();
    }
    result.stats = weights->GetStats();
    return result;
  }

  EmuWorld world_{MachineOptions(), SmallWindows()};
};

TEST_F(FrozenWeightsTest, AdaptersTrainAsBesideTheWidenedBaseAndFewerBytesTravel) {
  const Trained wide = Train(Adapted(6), FrozenForm::kAsIs);
  for (const FrozenForm form : {FrozenForm::kBFloat16, FrozenForm::kInt8Blocks}) {
    const Trained expected = Train(AdaptedWithValuesIn(form, 6), FrozenForm::kAsIs);
    const Trained narrow = Train(Adapted(6), form);
    for (size_t i = 0; i < expected.losses.size(); ++i) {
      EXPECT_TRUE(SameBytes(expected.losses[i], narrow.losses[i])) << "loss " << i;
      EXPECT_FALSE(SameBytes(wide.losses[i], narrow.losses[i])) << "the form shows";
    }
    EXPECT_EQ(narrow.stats.fetches, expected.stats.fetches);
    EXPECT_GT(narrow.stats.drops, 20u) << "the premise: bases come and go";
    EXPECT_LT(static_cast<double>(narrow.stats.fetched_bytes),
              (form == FrozenForm::kBFloat16 ? 0.62 : 0.45) *
                  static_cast<double>(expected.stats.fetched_bytes))
        << "adapters travel as they are";
  }
}

TEST_F(FrozenWeightsTest, WhatIsWidenedStaysWithinTheWindow) {
  torch::nn::Sequential net = Adapted(6);
  for (Tensor& parameter : net->parameters()) parameter.requires_grad_(false);
  // Two layers, and one at rest.
  constexpr uint64_t kLayerBytes = kWidth * kWidth * 4 + 5 * 512 + 2 * 4 * kWidth * 4;
  const uint64_t window_bytes = 2 * kLayerBytes + kLayerBytes / 2;
  const auto weights = Attach(*net, FrozenForm::kBFloat16, window_bytes);
  const at::NoGradGuard no_grad;
  const Tensor x = X();
  const uint64_t before_bytes = world_.device_bytes();
  world_.machine().ResetPeakMemory(0);
  for (int pass = 0; pass < 4; ++pass) net->forward(x);
  ASSERT_TRUE(world_.Synchronize().ok());
  EXPECT_LE(world_.machine().memory_stats(0).peak_bytes,
            before_bytes + window_bytes + 6 * x.nbytes());
  EXPECT_GT(weights->GetStats().fetched_ahead, 0u);
}

TEST_F(FrozenWeightsTest, OtherStreamsAndThreadsUseWhatOneHasWidened) {
  for (const FrozenForm form : {FrozenForm::kBFloat16, FrozenForm::kInt8Blocks}) {
    torch::nn::Sequential net = Adapted(5);
    const auto weights = Attach(*net, form);
    const at::NoGradGuard no_grad;
    const Tensor expected = AdaptedWithValuesIn(form, 5)->forward(Waves({8, kWidth}, 0));
    for (int round = 0; round < 3; ++round) {
      EXPECT_TRUE(AsOnCpu(net->forward(X()).cpu(), expected));
      const c10::StreamGuard guard(world_.NewStream());
      EXPECT_TRUE(AsOnCpu(net->forward(X()).cpu(), expected));
    }
    std::vector<std::thread> threads;
    std::vector<int> wrong(2);
    for (int n = 0; n < 2; ++n) {
      threads.emplace_back([&, n] {
        const at::NoGradGuard no_grad_here;
        for (int request = 0; request < 20; ++request) {
          wrong[n] += AsOnCpu(net->forward(X()).cpu(), expected) ? 0 : 1;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong[0] + wrong[1], 0);
    ASSERT_TRUE(world_.Synchronize().ok());
  }
}

TEST_F(FrozenWeightsTest, SavingGivesTheWidenedValuesAndChangesNone) {
  torch::nn::Sequential net = Adapted(2);
  const auto weights = Attach(*net, FrozenForm::kInt8Blocks);
  std::stringstream saved;
  weights->WithParametersOnHost([&] { torch::save(net, saved); });
  torch::nn::Sequential loaded = Adapted(2);
  torch::load(loaded, saved);
  const torch::nn::Sequential expected = AdaptedWithValuesIn(FrozenForm::kInt8Blocks, 2);
  for (size_t i = 0; i < expected->parameters().size(); ++i) {
    EXPECT_TRUE(SameBytes(loaded->parameters()[i], expected->parameters()[i])) << i;
    EXPECT_TRUE(SameBytes(net->parameters()[i].cpu(), expected->parameters()[i])) << i;
  }
}

TEST_F(FrozenWeightsTest, WhatIsLoadedIsNarrowedAgain) {
  torch::nn::Sequential other = Adapted(2);
  {
    const at::NoGradGuard no_grad;
    for (Tensor& parameter : other->parameters()) parameter.mul_(0.3);
  }
  std::stringstream saved;
  torch::save(other, saved);
  torch::nn::Sequential net = Adapted(2);
  const auto weights = Attach(*net, FrozenForm::kInt8Blocks);
  const at::NoGradGuard no_grad;
  net->forward(X());
  weights->WithParametersOnHost([&] {
    torch::load(net, saved);
    net->parameters()[0].mul_(2);
  });
  other->parameters()[0].mul_(2);
  for (Tensor& parameter : other->parameters()) {
    if (!parameter.requires_grad()) parameter.copy_(ValuesIn(FrozenForm::kInt8Blocks, parameter));
  }
  EXPECT_TRUE(AsOnCpu(net->forward(X()).cpu(), other->forward(Waves({8, kWidth}, 0))));
}

TEST_F(FrozenWeightsTest, WhatCannotBeNarrowedAgainIsRefusedAndTheModelIsWhatItWas) {
  torch::nn::Sequential net = Adapted(2);
  const auto weights = Attach(*net, FrozenForm::kInt8Blocks);
  const at::NoGradGuard no_grad;
  const Tensor before = net->forward(X()).cpu();
  EXPECT_THAT(ErrorOf([&] {
                weights->WithParametersOnHost(
                    [&] { net->parameters()[0][3][5] = std::numeric_limits<float>::infinity(); });
              }),
              HasSubstr("0.base.weight has values that are not finite"));
  EXPECT_TRUE(SameBytes(net->forward(X()).cpu(), before));
}

TEST_F(FrozenWeightsTest, AStorageWithBytesThatTheWeightDoesNotShowRestsAsItIs) {
  const Tensor whole = Waves({8, kWidth}, 5);
  EXPECT_EQ(RestingFormOf(whole.slice(0, 0, 4), FrozenForm::kInt8Blocks).form, FrozenForm::kAsIs);
  EXPECT_EQ(RestingFormOf(whole.t(), FrozenForm::kInt8Blocks).form, FrozenForm::kInt8Blocks);
}

TEST_F(FrozenWeightsTest, AValueThatIsNotFiniteIsRefusedByNameAndNothingIsAttached) {
  torch::nn::Sequential net = Adapted(2);
  {
    const at::NoGradGuard no_grad;
    net->parameters()[6][3][5] = std::numeric_limits<float>::infinity();
  }
  EXPECT_THAT(
      WeightOffloader::Attach(*net, world_.device(), world_.backend(),
                              Options(FrozenForm::kInt8Blocks))
          .status()
          .ToString(),
      AllOf(HasSubstr("1.base.weight has values that are not finite"), HasSubstr("use kBFloat16")));
  EXPECT_TRUE(net->parameters()[6].is_cpu());
  Attach(*net, FrozenForm::kBFloat16);
}

TEST_F(FrozenWeightsTest, AWindowWithoutRoomToWidenIsRefused) {
  torch::nn::Sequential net = Adapted(2);
  const uint64_t wide_bytes = kWidth * kWidth * 4 + 512;
  EXPECT_THAT(WeightOffloader::Attach(*net, world_.device(), world_.backend(),
                                      Options(FrozenForm::kBFloat16, wide_bytes))
                  .status()
                  .ToString(),
              AllOf(HasSubstr("window_bytes is " + std::to_string(wide_bytes)),
                    HasSubstr("alone needs " + std::to_string(wide_bytes + wide_bytes / 2 + 256))));
}

TEST_F(FrozenWeightsTest, ADeviceWithoutRoomToWidenIsNamedAndNothingIsLost) {
  world_.DropSession();
  EmulatedOptions small = MachineOptions();
  small.memory_bytes = 96 << 10;
  EmuWorld world(small, SmallWindows());
  torch::nn::Sequential net = Adapted(3);
  const auto weights = WeightOffloader::Attach(*net, world.device(), world.backend(),
                                               Options(FrozenForm::kInt8Blocks))
                           .value();
  const at::NoGradGuard no_grad;
  const Tensor x = Waves({8, kWidth}, 0).to(world.device());
  const Tensor expected =
      AdaptedWithValuesIn(FrozenForm::kInt8Blocks, 3)->forward(Waves({8, kWidth}, 0));
  {
    const Tensor hog = at::empty({80 << 10}, x.options().dtype(at::kByte));
    EXPECT_THAT(ErrorOf([&] { net->forward(x); }),
                AllOf(HasSubstr("the weights of \"0\" need"), HasSubstr("no room")));
  }
  EXPECT_TRUE(SameBytes(net->forward(x).cpu(), expected));
}

}  // namespace frozen_form_test
}  // namespace pinion::testing
