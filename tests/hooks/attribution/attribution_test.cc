// Checks what attribution captures, on which devices, and its errors. attribution_memory_test.cc
// checks memory and time, captum_test.cc the numbers.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/layer_methods.h"
#include "pinion/hooks/attribution/layer_options.h"
#include "pinion/hooks/attribution/tap.h"
#include "pinion/hooks/attribution/tapped_module.h"
#include "pinion/hooks/attribution/target.h"
#include "pinion/tests/hooks/attribution/attribution_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/error_of.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace {

using at::Tensor;
using ::testing::HasSubstr;
using Tensors = std::vector<Tensor>;

TEST_F(AttributionTest, OperatorsInPlaceDoNotChangeWhatWasCaptured) {
  const Tensor w = Make(2).requires_grad_();
  for (const bool is_frozen : {false, true}) {
    w.set_requires_grad(!is_frozen);
    const auto forward = [&](const Tensors& in) {
      Tensor y = Tap("y", at::matmul(in[0], w));
      const Tensor whole = y;
      y.mul_(3);
      whole.select(0, 0).zero_();
      y.relu_();
      y = Tap("after", y);
      return (y * y).sum(1);
    };
    const auto layers =
        session_->ComputeLayerGradientsAndEval(forward, {"y", "after"}, {Make(1)}, Target());
    const Tensor y = at::matmul(Make(1).cpu(), w.detach().cpu());
    Tensor after = (y * 3).relu();
    after.select(0, 0).zero_();
    EXPECT_TRUE(at::allclose(layers[0].tensors[0].activation, y));
    EXPECT_TRUE(at::allclose(layers[1].tensors[0].activation, after));
    EXPECT_TRUE(at::allclose(layers[1].tensors[0].gradient, 2 * after));
    EXPECT_TRUE(at::allclose(layers[0].tensors[0].gradient, 6 * after));
  }
}

TEST_F(AttributionTest, ATensorThatIsGivenToATapIsCapturedAsItWasWhoeverHasItStill) {
  Tensor goes_on;
  const auto forward = [&](const Tensors& in) {
    goes_on = Tap("alone", in[0] * 2);
    goes_on.add_(1);
    Tensor named = in[0] * 3;
    const Tensor name = named;
    Tap("named", std::move(named));
    name.zero_();
    Tensor viewed = in[0] * 4;
    const Tensor view = viewed.view({-1});
    Tap("viewed", std::move(viewed));
    view.zero_();
    const Tensor owner = in[0] * 5;
    const auto blob = [&] { return at::for_blob(owner.data_ptr(), owner.sizes()); };
    Tap("foreign", blob().options(owner.options()).target_device(owner.device()).make_tensor());
    owner.zero_();
    // Neither case keeps a reference to the tapped tensor, but both share its memory.
    Tensor detached = in[0] * 6;
    const Tensor other = detached.detach();
    Tap("detached", std::move(detached));
    other.zero_();
    const Tensor base = in[0] * 7;
    Tap("part", base.view({-1}));
    base.zero_();
    return in[0].sum(1);
  };
  const auto layers = session_->EvalLayers(
      forward, {"alone", "named", "viewed", "foreign", "detached", "part"}, {Make(1)});
  EXPECT_TRUE(SameBytes(layers[5].tensors[0].activation.view_as(Make(1)), Make(1).cpu() * 7));
  for (int layer = 0; layer < 5; ++layer) {
    EXPECT_TRUE(SameBytes(layers[layer].tensors[0].activation, Make(1).cpu() * (layer + 2)));
  }
  EXPECT_TRUE(SameBytes(goes_on.cpu(), Make(1).cpu() * 2 + 1));
}

TEST_F(AttributionTest, ATensorOfAModelThatTakesGradientsItselfKeepsItsPlaceInTheGraph) {
  Tensor force, kept_gradient;
  const auto forward = [&](const Tensors& in) {
    const at::AutoGradMode grad(true);
    Tensor position = in[0].detach().clone().requires_grad_();
    {
      // As if the tap were in a part of the model that records no graph.
      const at::NoGradGuard no_grad;
      position = Tap("position", std::move(position));
    }
    Tensor doubled = position * 2;
    doubled.retain_grad();
    const Tensor& same = doubled = Tap("doubled", std::move(doubled));
    (same * same).sum().backward();
    force = position.grad();
    kept_gradient = doubled.grad();
    return in[0].sum(1);
  };
  const auto layers = session_->EvalLayers(forward, {"position", "doubled"}, {Make(1)});
  const Tensor x = Make(1).cpu();
  EXPECT_TRUE(SameBytes(layers[0].tensors[0].activation, x));
  EXPECT_TRUE(SameBytes(layers[1].tensors[0].activation, x * 2));
  ASSERT_TRUE(force.defined());
  ASSERT_TRUE(kept_gradient.defined());
  EXPECT_TRUE(SameBytes(force.cpu(), x * 8));
  EXPECT_TRUE(SameBytes(kept_gradient.cpu(), x * 4));
}

TEST_F(AttributionTest, AGradientIsThatOfTheTensorWhoeverUsesIt) {
  // A residual connection: the layer's input also bypasses the layer.
  const torch::nn::Sequential body((torch::nn::Tanh()));
  const SequentialTaps taps(body, "body.");
  const auto forward = [&](const Tensors& in) {
    const Tensor h = in[0] * 2;
    return (h * 5 + body.ptr()->forward(h) * 0).sum(1);
  };
  const auto layers =
      session_->ComputeLayerGradientsAndEval(forward, {"body.0.input"}, {Make(1)}, Target());
  EXPECT_TRUE(SameBytes(layers[0].tensors[0].gradient, at::full({kSide, kSide}, 5.f)));
}

TEST_F(AttributionTest, LayersOfOnePlaceInTheGraphHaveOneGradient) {
  const auto forward = [&](const Tensors& in) {
    const Tensor y = Tap("a", in[0] * 2);
    return (Tap("b", y) * 3).sum(1);
  };
  for (const bool keep_on_device : {false, true}) {
    LayerOptions options;
    options.keep_on_device = keep_on_device;
    const auto layers = session_->ComputeLayerGradientsAndEval(forward, {"b", "a", "b"}, {Make(1)},
                                                               Target(), options);
    EXPECT_EQ(world_.session()->GetAllocatorStats().requested_bytes.current,
              keep_on_device ? 0 : 3 * kLayerBytes);
    for (const LayerResult& layer : layers) {
      EXPECT_TRUE(SameBytes(layer.tensors[0].gradient.cpu(), at::full({kSide, kSide}, 3.f)));
      EXPECT_TRUE(SameBytes(layer.tensors[0].activation.cpu(), Make(1).cpu() * 2));
    }
  }
}

TEST_F(AttributionTest, TheLastCallOfALayerCounts) {
  const auto forward = [&](const Tensors& in) {
    Tensor y = Tap("layer", in[0] * 2);
    y = Tap("layer", y * 3);
    return (y * 5).sum(1);
  };
  const auto layers =
      session_->ComputeLayerGradientsAndEval(forward, {"layer"}, {Make(1)}, Target());
  EXPECT_TRUE(SameBytes(layers[0].tensors[0].activation, Make(1).cpu() * 2 * 3));
  EXPECT_TRUE(SameBytes(layers[0].tensors[0].gradient, at::full({kSide, kSide}, 5.f)));
}

EmulatedOptions TwoDevices() {
  EmulatedOptions options = MachineOptions();
  options.device_count = 2;
  return options;
}

class TwoDevicesTest : public AttributionTest {
 protected:
  TwoDevicesTest() : AttributionTest(TwoDevices()) {}
};

TEST_F(TwoDevicesTest, PartsOnSeveralDevicesAreConcatenatedInTheirOrder) {
  const auto forward = [&](const Tensors& in) {
    Tensor first = Tap("layer", in[0] * 2), second = Tap("layer", in[1] * 3);
    const Tensor sums = (second * 7).sum(1).to(first.device());
    return at::cat({(first * 5).sum(1), sums});
  };
  const Tensor a = Make(1), b = Make(2, /*device=*/1).narrow(0, 0, 5).contiguous();
  const Tensor on_first = a.cpu() * 2, on_second = b.cpu() * 3;
  const int first = world_.device(0).index(), second = world_.device(1).index();
  LayerOptions options;
  for (const bool keep_on_device : {false, true}) {
    options.keep_on_device = keep_on_device;
    options.device_ids = {};
    auto layers =
        session_->ComputeLayerGradientsAndEval(forward, {"layer"}, {a, b}, Target(), options);
    EXPECT_TRUE(SameBytes(layers[0].tensors[0].activation.cpu(), at::cat({on_first, on_second})));
    EXPECT_TRUE(SameBytes(layers[0].tensors[0].gradient.cpu(),
                          at::cat({on_first * 0 + 5, on_second * 0 + 7})));
    options.device_ids = {7, second, first};
    layers = session_->ComputeLayerGradientsAndEval(forward, {"layer"}, {a, b}, Target(), options);
    EXPECT_TRUE(SameBytes(layers[0].tensors[0].activation.cpu(), at::cat({on_second, on_first})));
    EXPECT_EQ(layers[0].tensors[0].activation.device(),
              keep_on_device ? world_.device(1) : c10::Device(at::kCPU));
  }
  options.device_ids = {second};
  EXPECT_THAT(
      ErrorOf([&] {
        session_->EvalLayers(forward, {"layer"}, {a, b}, options);
      }),
      HasSubstr("layer \"layer\" ran on 2 devices, of which LayerOptions::device_ids names 1"));
}

TEST_F(TwoDevicesTest, ReplicasOnThreadsOfTheirOwnAreHeardWhereTheyStandIn) {
  std::atomic<int> recording = 0;
  const auto replica = [&](const Tensor& x) {
    if (at::GradMode::is_enabled()) ++recording;
    const Tensor y = Tap("layer", x * 2);
    return (Tap("late", at::tanh(y)) * y).sum(1);
  };
  const auto forward = [&](const Tensors& in) {
    const TapHandover handover;
    Tensors outputs(2);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < 2; ++i) {
      threads.emplace_back([&, i] {
        const TapScope taps(handover);
        outputs[i] = replica(in[i]);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return at::cat({outputs[0], outputs[1].to(outputs[0].device())});
  };
  const Tensors parts = {Make(1), Make(2, /*device=*/1)};
  const Tensor whole = at::cat({parts[0].cpu(), parts[1].cpu()});
  const auto in_one = session_->ComputeLayerGradientsAndEval(
      [&](const Tensors& in) { return replica(in[0]); }, {"late", "layer"}, {whole}, Target());
  for (int round = 0; round < 5; ++round) {
    const auto layers =
        session_->ComputeLayerGradientsAndEval(forward, {"late", "layer"}, parts, Target());
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_TRUE(at::allclose(layers[i].tensors[0].activation, in_one[i].tensors[0].activation));
      EXPECT_TRUE(at::allclose(layers[i].tensors[0].gradient, in_one[i].tensors[0].gradient));
    }
  }
  recording = 0;
  const auto values = LayerActivation(*session_, forward, {"late"}, parts);
  EXPECT_TRUE(at::allclose(values[0].tensors[0], in_one[0].tensors[0].activation));
  EXPECT_EQ(recording, 0) << "of values alone, no thread records a graph";
}

Tensor WithAsideAndUnconnected(const Tensors& in) {
  const Tensor y = Tap("used", in[0] * 2);
  Tap("aside", at::tanh(y));
  Tap("numbers", at::arange(3, in[0].options().dtype(at::kLong)));
  return y.sum(1);
}

TEST_F(AttributionTest, ALayerThatNeverRanOrIsNotConnectedIsAnErrorThatNamesIt) {
  const auto compute = [&](const std::string& layer) {
    return ErrorOf([&] {
      session_->ComputeLayerGradientsAndEval(WithAsideAndUnconnected, {"used", layer}, {Make(1)},
                                             Target());
    });
  };
  EXPECT_EQ(compute("used"), "no error");
  EXPECT_THAT(compute("uesd"), HasSubstr("layer \"uesd\" was not called in forward"));
  EXPECT_THAT(compute("aside"), HasSubstr("the output does not depend on layer \"aside\""));
  EXPECT_THAT(compute("numbers"), HasSubstr("layer \"numbers\" is of Long, which has no gradient"));
}

TEST_F(AttributionTest, WhereZerosAreAskedForFlagsSayWhichLayersTheyAreOf) {
  LayerOptions options;
  options.unused_layers = UnusedLayers::kZeros;
  const auto layers = session_->ComputeLayerGradientsAndEval(
      WithAsideAndUnconnected, {"aside", "never", "used"}, {Make(1)}, Target(), options);
  EXPECT_TRUE(layers[0].ran);
  EXPECT_FALSE(layers[0].connected());
  EXPECT_TRUE(SameBytes(layers[0].tensors[0].gradient, at::zeros({kSide, kSide})));
  EXPECT_FALSE(layers[1].ran);
  EXPECT_TRUE(layers[1].tensors.empty());
  EXPECT_TRUE(layers[2].connected());
}

TEST_F(AttributionTest, IntegersHaveValuesAndAnOuterNoGradMakesNoDifference) {
  const at::NoGradGuard no_grad;
  const auto values = LayerActivation(*session_, WithAsideAndUnconnected, {"numbers"}, {Make(1)});
  EXPECT_TRUE(SameBytes(values[0].tensors[0], at::arange(3)));
  const auto layers = session_->ComputeLayerGradientsAndEval(WithAsideAndUnconnected, {"used"},
                                                             {Make(1)}, Target());
  EXPECT_TRUE(layers[0].connected());
}

TEST_F(AttributionTest, TheProgramsTensorsAreAsTheyWereAlsoAfterAnError) {
  const Tensor x = Make(1), part = x.narrow(0, 0, 3), w = Make(2).requires_grad_();
  const auto forward = [&](bool fails) {
    return [&, fails](const Tensors&) {
      const Tensor y =
          Tap("x", x).sum(1) + Tap("part", part).mul_(3).sum() + (Tap("w", w).mul_(3) * w).sum(1);
      if (fails) throw std::runtime_error("this model fails");
      return y;
    };
  };
  EXPECT_THROW(
      session_->ComputeLayerGradientsAndEval(forward(true), {"x", "part", "w"}, {}, Target()),
      std::runtime_error);
  session_->ComputeLayerGradientsAndEval(forward(false), {"x", "part", "w"}, {}, Target());
  for (const Tensor& tensor : {x, part}) EXPECT_TRUE(tensor.is_leaf() && !tensor.requires_grad());
  EXPECT_FALSE(w.grad().defined());
  // A later backward must not capture anything.
  const uint64_t host_bytes = world_.session()->GetAllocatorStats().requested_bytes.current;
  (w * 2).sum().backward();
  EXPECT_TRUE(SameBytes(w.grad().cpu(), at::full({kSide, kSide}, 2.f)));
  EXPECT_EQ(world_.session()->GetAllocatorStats().requested_bytes.current, host_bytes);
}

TEST_F(AttributionTest, AnInputThatTheModelChangesInPlaceHasNoHistoryBehind) {
  const Tensor x = Make(1);
  const auto forward = [](const Tensors& in) { return in[0].relu_().sum(1); };
  for (int round = 0; round < 2; ++round) {
    Saliency(*session_, forward, {x}, Target());
    EXPECT_TRUE(x.is_leaf() && !x.requires_grad());
  }
  EXPECT_THAT(ErrorOf([&] { Saliency(*session_, forward, {x.to(at::kLong)}, Target()); }),
              HasSubstr("input 0 is of Long, which has no gradient"));
}

TEST_F(TwoDevicesTest, AfterAnErrorOnOneDeviceNothingIsDeliveredFromAnother) {
  const auto forward = [](const Tensors& in) {
    const Tensor first = Tap("first", in[0] * 2), second = Tap("second", in[1] * 3);
    return (first * 5).sum(1) + (second * 7).sum(1).to(first.device());
  };
  for (int round = 0; round < 20; ++round) {
    std::atomic<bool> has_returned = false;
    std::atomic<int> late = 0;
    LayerCallbacks callbacks;
    callbacks.output_function = [&](LayerPart part, const Tensor& gradient) {
      if (part.layer == 0) throw std::runtime_error("no room for this one");
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      if (has_returned) ++late;
      return gradient.clone();
    };
    LayerOptions options;
    options.activations = false;
    EXPECT_THROW(
        session_->ComputeLayerGradientsAndEval(forward, {"first", "second"}, {Make(1), Make(2, 1)},
                                               Target(), options, callbacks),
        std::runtime_error);
    has_returned = true;
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    EXPECT_EQ(late, 0);
  }
}

TEST_F(AttributionTest, AnOutputFunctionThatReturnsTheModelsMemoryDeliversWhatItHadThen) {
  LayerCallbacks of_the_layer[2];
  of_the_layer[0].output_function = [](LayerPart, const Tensor& tensor) { return tensor; };
  of_the_layer[1].output_function = [](LayerPart, const Tensor& t) { return t.view({-1}); };
  const auto forward = [](const Tensors& in) { return Tap("layer", in[0] * 2).mul_(100).sum(1); };
  const Tensor expected = Make(1).cpu() * 2;
  for (const LayerCallbacks& callbacks : of_the_layer) {
    for (const bool keep_on_device : {false, true}) {
      LayerOptions options;
      options.keep_on_device = keep_on_device;
      const auto values = session_->EvalLayers(forward, {"layer"}, {Make(1)}, options, callbacks);
      const auto both = session_->ComputeLayerGradientsAndEval(forward, {"layer"}, {Make(1)},
                                                               Target(), options, callbacks);
      for (const auto& layers : {values, both}) {
        const Tensor actual = layers[0].tensors[0].activation.cpu().view_as(expected);
        EXPECT_TRUE(actual.equal(expected)) << "keep_on_device " << keep_on_device;
      }
    }
  }
}

TEST_F(AttributionTest, AGraphThatTheModelKeepsCanBeUsedAndHasNoPartInIt) {
  const Tensor w = Make(2).requires_grad_();
  Tensor kept;
  const auto forward = [&](const Tensors& in) {
    kept = Tap("layer", in[0] * w);
    return at::zeros({kSide}, w.options()) + kept.sum(1);
  };
  session_->ComputeLayerGradientsAndEval(forward, {"layer"}, {Make(1)}, Target());
  kept.sum().backward();
  EXPECT_TRUE(SameBytes(w.grad().cpu(), Make(1).cpu()));
}

TEST_F(AttributionTest, BackwardDoesNotGoBeyondTheLayers) {
  struct Upstream : torch::autograd::Function<Upstream> {
    static Tensor forward(torch::autograd::AutogradContext*, const Tensor& x) { return x * 2; }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   const torch::autograd::variable_list&) {
      throw std::runtime_error("nobody asked for this gradient");
    }
  };
  const Tensor w = Make(2).requires_grad_();
  const auto forward = [&](const Tensors&) {
    return at::tanh(Tap("layer", Upstream::apply(w))).sum(1);
  };
  const auto layers = session_->ComputeLayerGradientsAndEval(forward, {"layer"}, {}, Target());
  EXPECT_TRUE(layers[0].connected());
}

TEST_F(AttributionTest, ATargetThatDoesNotFitTheOutputIsAnErrorThatSaysWhy) {
  const auto error = [&](const Target& target, const std::vector<int64_t>& shape) {
    return ErrorOf([&] { target.Select(at::ones(shape)); });
  };
  EXPECT_THAT(error(Target(), {3, 4}), HasSubstr("give a target that selects one"));
  EXPECT_THAT(error(Target(), {}), HasSubstr("no dimension that counts examples"));
  EXPECT_THAT(error(Target::Class(1), {3}), HasSubstr("selects no column"));
  EXPECT_THAT(error(Target::Class(1), {3, 4, 5}), HasSubstr("the target leaves [3, 5]"));
  EXPECT_THAT(error(Target::IndexPerExample({{1}, {1}}), {2}),
              HasSubstr("a target of 1 indices selects no column of an output of [2]"));
  EXPECT_THAT(error(Target::PerExample({1, 2}), {3, 4}), HasSubstr("2 targets, and 3 examples"));
  EXPECT_THAT(error(Target::IndexPerExample({}), {0, 4}),
              HasSubstr("an output of [0, 4] has no example: give at least one"));
  EXPECT_THAT(error(Target::PerExample({1, 2, 3}), {3, 4, 5}), HasSubstr("IndexPerExample"));
  for (const int64_t missing : {4, -1}) {
    EXPECT_THAT(error(Target::PerExample({0, missing}), {2, 4}),
                HasSubstr("the target of row 1 is class " + std::to_string(missing) +
                          ", and the output of [2, 4] has classes 0 to 3"));
    EXPECT_THAT(error(Target::Index({1, missing}), {2, 3, 4}),
                HasSubstr("the target is index " + std::to_string(missing) +
                          " in dimension 2, and the output of [2, 3, 4] has 0 to 3 there"));
    EXPECT_THAT(error(Target::IndexPerExample({{1, 1}, {1, missing}}), {2, 3, 4}),
                HasSubstr("the target of row 1 is index " + std::to_string(missing) +
                          " in dimension 2, and the output of [2, 3, 4] has 0 to 3 there"));
  }
  EXPECT_THAT(ErrorOf([] { Target::Of(at::ones({2})); }), HasSubstr("a target is one integer"));
}

TEST_F(AttributionTest, ATensorOfAnotherAcceleratorIsRefused) {
  const Tensors meta = {at::ones({2, 2}, at::Device(at::kMeta))};
  const auto forward = [](const Tensors& in) { return Tap("layer", in[0]).sum(1); };
  EXPECT_THAT(ErrorOf([&] { session_->EvalLayers(forward, {"layer"}, meta); }),
              HasSubstr("create the session with the backend of that device"));
}

}  // namespace
}  // namespace pinion::testing
