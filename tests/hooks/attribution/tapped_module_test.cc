// Checks what taps around modules see, and that the modules stay unchanged.

#include "pinion/hooks/attribution/tapped_module.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tanh.h>
#include <c10/util/Exception.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/layer_methods.h"
#include "pinion/hooks/attribution/layer_options.h"
#include "pinion/hooks/attribution/tap.h"
#include "pinion/hooks/attribution/target.h"
#include "pinion/tests/hooks/attribution/attribution_fixture.h"
#include "pinion/tests/hooks/support/error_of.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/captured_log.h"

namespace pinion::testing {
namespace {

using at::Tensor;
using ::testing::HasSubstr;
using Tensors = std::vector<Tensor>;

using TappedModuleTest = AttributionTest;

TEST_F(TappedModuleTest, ASequentialIsAsItWasWhenItsTapsAreGone) {
  const torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::ReLU(/*inplace=*/true));
  const auto names = model->named_parameters().keys();
  {
    const SequentialTaps taps(model);
    EXPECT_EQ(model->named_parameters().keys(), names);
    EXPECT_THROW(model->at<torch::nn::LinearImpl>(0), c10::Error) << "it is a tapped one";
  }
  EXPECT_NO_THROW(model->at<torch::nn::LinearImpl>(0));
}

TEST_F(TappedModuleTest, TapsOfOneSequentialThatEndInAnyOrderLeaveThoseThatAreOpen) {
  torch::nn::Sequential model((torch::nn::Tanh()));
  const Tensors x = {Make(1)};
  const auto forward = [&](const Tensors& in) { return model->forward(in[0]).sum(1); };
  LayerOptions options;
  options.unused_layers = UnusedLayers::kZeros;
  std::array<size_t, 3> order = {0, 1, 2};
  do {
    SCOPED_TRACE(::testing::PrintToString(order));
    const CapturedLog log;
    std::array<std::unique_ptr<SequentialTaps>, 3> taps;
    for (size_t i = 0; i < 3; ++i) {
      taps[i] = std::make_unique<SequentialTaps>(model, std::to_string(i) + ".");
    }
    for (const size_t ended : order) {
      taps[ended].reset();
      const auto layers = session_->EvalLayers(forward, {"0.0", "1.0", "2.0"}, x, options);
      for (size_t i = 0; i < 3; ++i) EXPECT_EQ(layers[i].ran, taps[i] != nullptr) << i;
    }
    EXPECT_NO_THROW(model->at<torch::nn::TanhImpl>(0));
    EXPECT_EQ(log.text(), "");
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(TappedModuleTest, TapsOfASequentialThatChangedMeanwhileLeaveItAndSaySo) {
  torch::nn::Sequential model((torch::nn::Tanh()), (torch::nn::Tanh()));
  const CapturedLog log;
  {
    const SequentialTaps taps(model, "features.");
    *model->begin() = torch::nn::AnyModule(torch::nn::ReLU());
  }
  EXPECT_NO_THROW(model->at<torch::nn::ReLUImpl>(0));
  EXPECT_NO_THROW(model->at<torch::nn::TanhImpl>(1));
  EXPECT_THAT(log.text(), HasSubstr("the taps \"features.0\" stay as they are"));
}

TEST_F(TappedModuleTest, AModelOfTappedModulesCanBeCloned) {
  const torch::nn::Sequential model(pinion::nn::Tapped("fc", torch::nn::Linear(kSide, kSide)));
  const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone());
  copy->to(world_.device());
  const auto forward = [&](const Tensors& in) { return copy->forward(in[0]); };
  const auto layers = session_->ComputeLayerGradientsAndEval(forward, {"fc", "fc.input"}, {Make(1)},
                                                             Target::Class(1));
  EXPECT_TRUE(layers[0].connected() && layers[1].connected());
}

class CountingListener : public TapListener {
 public:
  Tensors OnTap(std::string_view, Tensors tensors) override {
    ++taps;
    return tensors;
  }
  int taps = 0;
};

TEST(TapScopeTest, ScopesThatEndInAnyOrderLeaveTheInnermostOfThoseThatAreOpen) {
  std::array<size_t, 3> order = {0, 1, 2};
  do {
    SCOPED_TRACE(::testing::PrintToString(order));
    const CapturedLog log;
    std::array<CountingListener, 3> listeners;
    std::array<std::unique_ptr<TapScope>, 3> scopes;
    for (size_t i = 0; i < 3; ++i) scopes[i] = std::make_unique<TapScope>(&listeners[i]);
    std::array<int, 3> expected = {};
    for (const size_t ended : order) {
      scopes[ended].reset();
      Tap("layer", at::ones({1}));
      for (size_t i = 3; i-- > 0;) {
        if (scopes[i] == nullptr) continue;
        ++expected[i];
        break;
      }
      for (size_t i = 0; i < 3; ++i) EXPECT_EQ(listeners[i].taps, expected[i]) << i;
    }
    const bool is_in_order = order == std::array<size_t, 3>{2, 1, 0};
    EXPECT_EQ(log.text().empty(), is_in_order) << log.text();
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(TapScopeTest, AListenerThatReturnsMoreOrFewerTensorsIsRefusedByTheTapsName) {
  class Dropping : public TapListener {
   public:
    Tensors OnTap(std::string_view, Tensors) override { return {}; }
  } dropping;
  const TapScope scope(&dropping);
  const std::string one = ErrorOf([] { Tap("layer", at::ones({1})); });
  EXPECT_THAT(one, HasSubstr("Tap(\"layer\"): the TapListener returned 0 tensors for 1"));
  const std::string two = ErrorOf([] { Tap("layer", Tensors{at::ones({1}), at::ones({1})}); });
  EXPECT_THAT(two, HasSubstr("returned 0 tensors for 2: return as many"));
}

TEST(TapScopeTest, OneThatEndsOnAnotherThreadIsToldOfAndHearsOfNothing) {
  CountingListener listener;
  auto scope = std::make_unique<TapScope>(&listener);
  {
    const CapturedLog log;
    std::thread([&scope] { scope.reset(); }).join();
    EXPECT_THAT(log.text(), HasSubstr("TapScope has ended on another thread"));
  }
  Tap("layer", at::ones({1}));
  EXPECT_EQ(listener.taps, 0);
}

TEST(TapScopeTest, AHandoverThatOutlivesItsScopeIsRefusedWithTheRemedy) {
  const char* const remedy = "join replicas before forward returns";
  CountingListener listener;
  auto scope = std::make_unique<TapScope>(&listener);
  const TapHandover handover;
  std::string opened_late, tapped_late, handed_on;
  std::promise<void> may_tap;
  std::promise<void> has_opened;
  std::thread replica([&] {
    const TapScope taps(handover);
    Tap("layer", at::ones({1}));
    const TapHandover next;
    has_opened.set_value();
    may_tap.get_future().wait();
    tapped_late = ErrorOf([] { Tap("layer", at::ones({1})); });
    handed_on = ErrorOf([&] { const TapScope again(next); });
  });
  has_opened.get_future().wait();
  EXPECT_EQ(listener.taps, 1);
  scope.reset();
  opened_late = ErrorOf([&] { const TapScope taps(handover); });
  may_tap.set_value();
  replica.join();
  for (const std::string& error : {opened_late, tapped_late, handed_on}) {
    EXPECT_THAT(error, HasSubstr(remedy));
  }
  EXPECT_EQ(listener.taps, 1);
  Tap("layer", at::ones({1}));
  EXPECT_EQ(listener.taps, 1);
}

TEST(TapScopeTest, AHandoverOfAThreadWithoutAScopeHearsOfNothing) {
  const TapHandover handover;
  const TapScope taps(handover);
  EXPECT_EQ(ErrorOf([] { Tap("layer", at::Tensor()); }), "no error");
}

// Returns both halves of each row.
struct SplitImpl : torch::nn::Module {
  std::tuple<Tensor, Tensor> forward(const Tensor& x) {
    return {x.narrow(1, 0, 64) * 2, x.narrow(1, 64, 64) * 3};
  }
};
TORCH_MODULE(Split);

struct JoinImpl : torch::nn::Module {
  Tensor forward(std::tuple<Tensor, Tensor> halves) {
    return std::get<0>(halves) * std::get<1>(halves);
  }
};
TORCH_MODULE(Join);

struct ListImpl : torch::nn::Module {
  std::vector<Tensor> forward(const Tensor& x, const Tensor& y) { return {x, y, x * y}; }
};
TORCH_MODULE(List);

struct CountImpl : torch::nn::Module {
  int64_t forward(std::vector<Tensor> tensors) { return static_cast<int64_t>(tensors.size()); }
};
TORCH_MODULE(Count);

TEST_F(TappedModuleTest, TuplesBetweenTheChildrenOfASequentialAreLayersOfSeveralTensors) {
  torch::nn::Sequential model{Split(), Join()};
  const Tensor x = Make(1), left = x.cpu().narrow(1, 0, 64) * 2,
               right = x.cpu().narrow(1, 64, 64) * 3;
  const SequentialTaps taps(model, "gate.");
  const auto forward = [&](const Tensors& in) { return model->forward(in[0]).sum(1); };
  const auto layers = session_->ComputeLayerGradientsAndEval(
      forward, {"gate.0", "gate.1.input", "gate.0.input", "gate"}, {x}, Target());
  for (const size_t layer : {0, 1}) {
    ASSERT_EQ(layers[layer].tensors.size(), 2u);
    EXPECT_TRUE(SameBytes(layers[layer].tensors[0].activation, left));
    EXPECT_TRUE(SameBytes(layers[layer].tensors[1].activation, right));
    EXPECT_TRUE(SameBytes(layers[layer].tensors[0].gradient, right));
    EXPECT_TRUE(SameBytes(layers[layer].tensors[1].gradient, left));
  }
  EXPECT_TRUE(SameBytes(layers[2].tensors[0].activation, x.cpu()));
  EXPECT_TRUE(SameBytes(layers[3].tensors[0].activation, left * right));
}

TEST_F(TappedModuleTest, SeveralArgumentsAreOneLayerAndWhatIsNoTensorGoesThroughUntapped) {
  torch::nn::Sequential model{pinion::nn::Tapped("list", List()),
                              pinion::nn::Tapped("count", Count())};
  const Tensor x = Make(1), y = Make(2);
  const auto forward = [&](const Tensors& in) {
    EXPECT_EQ(model->forward<int64_t>(in[0], in[1]), 3);
    return in[0].sum(1);
  };
  const auto layers = LayerActivation(*session_, forward, {"list.input", "count.input"}, {x, y});
  ASSERT_EQ(layers[0].tensors.size(), 2u);
  EXPECT_TRUE(SameBytes(layers[0].tensors[1], y.cpu()));
  ASSERT_EQ(layers[1].tensors.size(), 3u);
  EXPECT_TRUE(SameBytes(layers[1].tensors[2], (x * y).cpu()));
  EXPECT_THAT(ErrorOf([&] {
                LayerActivation(*session_, forward, {"count"}, {x, y});
              }),
              HasSubstr("layer \"count\" was tapped with no tensor"));
}

// Calls its blocks by their own types, as programs must call a ModuleList's children.
struct BlocksImpl : torch::nn::Module {
  BlocksImpl() {
    blocks = register_module("blocks", torch::nn::ModuleList());
    blocks->push_back(torch::nn::Sequential(torch::nn::Tanh(), torch::nn::Tanh()));
    blocks->push_back(torch::nn::Sequential(torch::nn::Tanh()));
    blocks->push_back(pinion::nn::Tapped("own", torch::nn::Tanh()));
  }
  Tensor forward(Tensor x) {
    x = blocks[0]->as<torch::nn::SequentialImpl>()->forward(x);
    x = blocks[1]->as<torch::nn::SequentialImpl>()->forward(x * 2);
    return blocks[2]->as<pinion::nn::TappedImpl>()->forward(x * 3);
  }
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Blocks);

TEST_F(TappedModuleTest,
       OfAModuleListItsSequentialsAreFoundByTheirPlacesAndTappedOnesByTheirNames) {
  Blocks model;
  const auto forward = [&](const Tensors& in) { return model->forward(in[0]).sum(1); };
  const Tensor x = Make(1).cpu(), once = at::tanh(x), twice = at::tanh(once);
  const Tensor third = at::tanh(twice * 2);
  const auto parameters = model->named_modules().keys();
  {
    const ModuleTaps taps(*model);
    EXPECT_EQ(model->named_modules().keys(), parameters);
    const auto layers = session_->ComputeLayerGradientsAndEval(
        forward, {"blocks.0.0", "blocks.0", "blocks.1.input", "blocks.1", "own.input"}, {Make(1)},
        Target());
    const Tensors expected = {once, twice, twice * 2, third, third * 3};
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::allclose(layers[i].tensors[0].activation, expected[i])) << i;
      EXPECT_TRUE(layers[i].connected()) << i;
    }
  }
  EXPECT_THAT(ErrorOf([&] { session_->EvalLayers(forward, {"blocks.0"}, {Make(1)}); }),
              HasSubstr("layer \"blocks.0\" was not called"));
}

TEST_F(TappedModuleTest, ASequentialInTwoPlacesHasTheNameOfTheFirst) {
  const torch::nn::Sequential shared((torch::nn::Tanh()));
  const auto model = std::make_shared<torch::nn::Module>();
  model->register_module("a", shared);
  model->register_module("b", shared);
  {
    const ModuleTaps taps(*model);
    const auto forward = [&](const Tensors& in) { return shared.ptr()->forward(in[0]).sum(1); };
    EXPECT_TRUE(session_->EvalLayers(forward, {"a"}, {Make(1)})[0].ran);
  }
  EXPECT_NO_THROW(shared->at<torch::nn::TanhImpl>(0));
}

}  // namespace
}  // namespace pinion::testing
