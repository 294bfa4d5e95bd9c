// Checks the device memory, rows, draws and errors of the methods along a path. captum_test.cc
// compares their numbers with Captum's.

#include "pinion/hooks/attribution/path_methods.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/attribution/gradient_shap.h"
#include "pinion/hooks/attribution/layer_methods.h"
#include "pinion/hooks/attribution/tap.h"
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

constexpr int64_t kExamples = 6;
constexpr uint64_t kRowBytes = 64 * 64 * sizeof(float);

class PathMethodsTest : public AttributionTest {
 protected:
  // Returns distinct examples of kRowBytes each.
  Tensor Examples() const {
    return Make(1)
        .flatten()
        .narrow(0, 0, kExamples * 2048)
        .view({kExamples, 2, 1024})
        .repeat({1, 1, 2})
        .view({kExamples, 4096});
  }

  // Six layers that save their outputs, two of them tapped, and a weight that all rows share.
  Tensor Model(const Tensors& in) {
    largest_pass_ = std::max(largest_pass_, in[0].size(0));
    ++passes_;
    Tensor x = in[0];
    for (int layer = 0; layer < 3; ++layer) x = at::tanh(x * 1.5);
    x = Tap("middle", x);
    for (int layer = 0; layer < 3; ++layer) x = at::tanh(x * 1.5);
    x = Tap("late", x);
    if (in.size() > 1) x = x * in[1].unsqueeze(1);
    return x.view({x.size(0), 4, 1024}).sum(2);
  }

  AttributedForward model() {
    return [this](const Tensors& in) { return Model(in); };
  }

  // Waits until the device has freed the last method's memory, resets what passes leave behind, and
  // returns a budget with room for `rows`.
  uint64_t NewBudget(uint64_t rows) {
    EXPECT_TRUE(Soon([&] { return world_.device_bytes() < 2 * kExamples * kRowBytes; }));
    largest_pass_ = 0;
    passes_ = 0;
    world_.ResetPeak();
    return world_.device_bytes() + rows * kRowBytes;
  }
  static void ExpectClose(const Tensor& actual, const Tensor& expected, double tolerance = 1e-7) {
    EXPECT_TRUE(at::allclose(actual, expected, 1e-4, tolerance)) << (actual - expected).abs().max();
  }

  int64_t largest_pass_ = 0;
  int passes_ = 0;
};

// The arguments of a method that takes a budget.
struct Arguments {
  AttributionSession& session;
  AttributedForward forward;
  Tensor x;
  int64_t steps = 0;
  uint64_t budget_bytes = 0;

  PathOptions options() const {
    PathOptions options;
    options.n_steps = steps;
    options.device_budget_bytes = budget_bytes;
    return options;
  }
};

struct Batched {
  std::string name;
  std::function<Tensor(const Arguments& a)> run;
};

std::vector<Batched> BatchedMethods() {
  const Target target = Target::PerExample({0, 3, 1, 2, 3, 0});
  return {
      {"IntegratedGradients",
       [=](const Arguments& a) {
         return IntegratedGradients(a.session, a.forward, {a.x}, target, a.options())[0];
       }},
      {"LayerIntegratedGradients",
       [=](const Arguments& a) {
         const auto layers =
             LayerIntegratedGradients(a.session, a.forward, {"middle"}, {a.x}, target, a.options());
         return layers[0].tensors[0];
       }},
      {"InternalInfluence",
       [=](const Arguments& a) {
         const auto layers = InternalInfluence(a.session, a.forward, {"late", "middle"}, {a.x},
                                               target, a.options());
         return layers[1].tensors[0];
       }},
      {"LayerConductance",
       [=](const Arguments& a) {
         const auto layers =
             LayerConductance(a.session, a.forward, {"middle", "late"}, {a.x}, target, a.options());
         return layers[0].tensors[0];
       }},
      {"LayerGradientShap",
       [=](const Arguments& a) {
         ShapOptions shap;
         shap.n_samples = a.steps;
         shap.stdev = 0.1;
         shap.device_budget_bytes = a.budget_bytes;
         const auto layers = LayerGradientShap(a.session, a.forward, {"middle"}, {a.x},
                                               {a.x.narrow(0, 0, 3) * 0.5}, target, shap);
         return layers[0].tensors[0];
       }},
  };
}

TEST_F(PathMethodsTest, PassesStayUnderTheBudgetAtAnyNumberOfStepsAndUseIt) {
  const Tensor x = Examples();
  for (const Batched& method : BatchedMethods()) {
    SCOPED_TRACE(method.name);
    Tensor in_one_pass;
    for (const int64_t steps : {8, 40}) {
      const Tensor expected = method.run({*session_, model(), x, steps});
      const uint64_t budget = NewBudget(400);
      const Tensor actual = method.run({*session_, model(), x, steps, budget});
      EXPECT_LE(world_.peak_device_bytes(), budget);
      ExpectClose(actual, expected);
      if (steps == 8) continue;
      EXPECT_GE(world_.peak_device_bytes(), budget / 2);
      EXPECT_LT(largest_pass_, kExamples * steps);
      EXPECT_GT(largest_pass_, kExamples) << "several steps go together";
    }
  }
}

TEST_F(PathMethodsTest, WhatAPassStillHoldsForItsCopiesIsPartOfTheNextOnesBudget) {
  const Tensor x = Examples().narrow(0, 0, 1).contiguous();
  PathOptions options;
  options.n_steps = 150;
  for (uint64_t rows = 60; rows <= 600; rows += 60) {
    SCOPED_TRACE(rows);
    options.device_budget_bytes = NewBudget(rows);
    LayerConductance(*session_, model(), {"late"}, {x}, Target::Class(1), options);
    EXPECT_GT(passes_, 2);
    EXPECT_LE(world_.peak_device_bytes(), options.device_budget_bytes);
  }
}

TEST_F(PathMethodsTest, WhereOneStepOfAllExamplesIsTooMuchExamplesAreSplit) {
  const Tensor x = Examples();
  for (const Batched& method : BatchedMethods()) {
    SCOPED_TRACE(method.name);
    const Tensor expected = method.run({*session_, model(), x, 4});
    const uint64_t budget = NewBudget(60);
    const Tensor actual = method.run({*session_, model(), x, 4, budget});
    EXPECT_LE(world_.peak_device_bytes(), budget);
    EXPECT_LT(largest_pass_, method.name == "LayerConductance" ? 2 * kExamples : kExamples)
        << "which needs two steps";
    ExpectClose(actual, expected);
  }
}

TEST_F(PathMethodsTest, ABudgetThatIsTooSmallNamesTheLeastAndThatOneIsEnough) {
  const Tensor x = Examples();
  PathOptions options;
  options.device_budget_bytes = NewBudget(3);
  const auto run = [&] { IntegratedGradients(*session_, model(), {x}, Target::Class(1), options); };
  EXPECT_THROW(run(), c10::OutOfMemoryError);
  NewBudget(3);
  const std::string error = ErrorOf(run);
  EXPECT_THAT(error, HasSubstr("the smallest pass, 1 example at 1 steps, takes up to "));
  EXPECT_THAT(error, HasSubstr("raise device_budget_bytes to that"));
  NewBudget(3);
  options.device_budget_bytes = std::stoull(error.substr(error.find("up to ") + 6));
  EXPECT_EQ(ErrorOf(run), "no error");
  options.device_budget_bytes = 1000;
  EXPECT_THAT(ErrorOf(run), HasSubstr("before the first pass, and the budget is 1000"));
}

TEST_F(PathMethodsTest, ABudgetOfMoreThanAnyDeviceHasIsAsGoodAsThat) {
  for (const uint64_t budget_bytes : {uint64_t{1} << 63, UINT64_MAX}) {
    PathOptions options;
    options.device_budget_bytes = budget_bytes;
    EXPECT_EQ(ErrorOf([&] {
                IntegratedGradients(*session_, model(), {Examples()}, Target::Class(1), options);
              }),
              "no error");
    EXPECT_GT(largest_pass_, 1);
  }
}

TEST_F(PathMethodsTest, InAnOffloadScopeMoreRowsFitInABudget) {
  const Tensor x = Examples();
  const AttributedForward offloaded = [&](const Tensors& in) {
    const OffloadScope scope(world_.session());
    return Model(in);
  };
  PathOptions options;
  options.n_steps = 40;
  Tensors results;
  std::vector<int64_t> largest;
  for (const AttributedForward& forward : {model(), offloaded}) {
    options.device_budget_bytes = NewBudget(300);
    results.push_back(
        IntegratedGradients(*session_, forward, {x}, Target::Class(1), options).front());
    EXPECT_LE(world_.peak_device_bytes(), options.device_budget_bytes);
    largest.push_back(largest_pass_);
  }
  EXPECT_GT(largest[1], largest[0] * 5 / 4);
  ExpectClose(results[0], results[1]);
  EXPECT_GT(world_.QuietStats().offloaded, 0u);
}

TEST_F(PathMethodsTest, AdditionalInputsGoWithTheirRows) {
  const Tensor x = Examples();
  PathOptions options;
  options.n_steps = 6;
  options.additional_inputs = {at::arange(1, kExamples + 1, x.options())};
  const auto run = [&] {
    return IntegratedGradients(*session_, model(), {x}, Target::Class(1), options).front();
  };
  const Tensor expected = run();
  options.device_budget_bytes = NewBudget(70);
  ExpectClose(run(), expected);
  options.additional_inputs = {};
  options.device_budget_bytes = 0;
  const Tensor plain = run();
  ExpectClose(plain[2] * 3, expected[2]);  // the model multiplies by it
}

TEST_F(PathMethodsTest, MemoryThatGoesDuringTheFirstPassLetsNoPassGrowTooLarge) {
  const Tensor x = Examples();
  Tensor cache = at::zeros({600 * 4096}, x.options());
  const AttributedForward forward = [&](const Tensors& in) {
    cache = Tensor();
    return Model(in);
  };
  PathOptions options;
  options.n_steps = 40;
  options.device_budget_bytes = world_.device_bytes() + 50 * kRowBytes;
  const auto run = [&] {
    return IntegratedGradients(*session_, forward, {x}, Target::Class(1), options).front();
  };
  const Tensor actual = run();
  EXPECT_LT(largest_pass_, 100) << "240 rows are all there are";
  options.device_budget_bytes = 0;
  ExpectClose(actual, run());
}

TEST_F(PathMethodsTest, LayersSideBySideAndNamedTwiceAreAsEachByItself) {
  const Tensor x = Examples();
  const AttributedForward forward = [](const Tensors& in) {
    const Tensors halves = Tap("halves", {at::tanh(in[0] * 2), at::tanh(in[0] * 3)});
    const Tensor aside = Tap("aside", in[0].cos());
    return (halves[0] * halves[1] + aside * aside).sum(1);
  };
  PathOptions options;
  options.n_steps = 5;
  const auto run = [&](const std::vector<std::string>& layers) {
    return LayerIntegratedGradients(*session_, forward, layers, {x}, Target(), options);
  };
  const auto all = run({"aside", "halves", "aside"});
  ASSERT_EQ(all[1].tensors.size(), 2u);
  EXPECT_TRUE(SameBytes(all[0].tensors[0], all[2].tensors[0]));
  EXPECT_TRUE(at::allclose(all[0].tensors[0], run({"aside"})[0].tensors[0]));
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(at::allclose(all[1].tensors[i], run({"halves"})[0].tensors[i]));
  }
  const Tensor total = all[0].tensors[0] + all[1].tensors[0] + all[1].tensors[1];
  const Tensor delta = ConvergenceDelta(*session_, forward, {total}, {x}, Target(), options);
  EXPECT_LT(delta.abs().max().item<double>(), 1e-2) << "the paths of all layers are one";
}

TEST_F(PathMethodsTest, OfHalfPrecisionSumsAreKeptInFloat32) {
  const Tensor x = Examples();
  PathOptions options;
  options.n_steps = 50;
  const auto run = [&](const Tensor& input) {
    return LayerConductance(*session_, model(), {"late"}, {input}, Target::Class(2), options)[0]
        .tensors[0];
  };
  const Tensor exact = run(x), rough = run(x.to(at::kBFloat16));
  EXPECT_EQ(rough.scalar_type(), at::kFloat);
  EXPECT_LT((rough - exact).norm().item<double>(), 0.02 * exact.norm().item<double>());
}

TEST_F(PathMethodsTest, AfterReturnTheDeviceHoldsNothing) {
  const Tensor x = Examples();
  const uint64_t before_bytes = world_.device_bytes();
  std::vector<Tensor> results;
  for (const Batched& method : BatchedMethods()) {
    results.push_back(method.run({*session_, model(), x, 4}));
    EXPECT_TRUE(results.back().is_cpu());
    EXPECT_TRUE(Soon([&] { return world_.device_bytes() == before_bytes; })) << method.name;
  }
}

TEST_F(PathMethodsTest, OfIntegersThereIsNoPathButOfTheLayerBehindThem) {
  const Tensor table = Make(3).narrow(1, 0, 16).contiguous();
  const Tensor words = at::arange(8, at::kLong).view({2, 4}).to(world_.device());
  const AttributedForward forward = [&](const Tensors& in) {
    return at::tanh(Tap("embedding", at::embedding(table, in[0]))).sum(2);
  };
  PathOptions options;
  EXPECT_THAT(
      ErrorOf([&] { IntegratedGradients(*session_, forward, {words}, Target::Class(1), options); }),
      HasSubstr("input 0 is of Long, between whose values there is no path"));
  const auto heat =
      LayerIntegratedGradients(*session_, forward, {"embedding"}, {words}, Target::Class(1));
  // tanh is elementwise, so the integral is exactly the change of the selected word's output.
  const Tensor rows = at::embedding(table, words).cpu(),
               zero = at::embedding(table, words * 0).cpu();
  const Tensor change = at::tanh(rows) - at::tanh(zero);
  EXPECT_TRUE(at::allclose(heat[0].tensors[0].select(1, 1), change.select(1, 1), 1e-4, 1e-5));
  EXPECT_EQ(heat[0].tensors[0].select(1, 0).abs().sum().item<double>(), 0);
  options.baselines = {words + 3};
  const Tensor delta =
      ConvergenceDelta(*session_, forward,
                       LayerIntegratedGradients(*session_, forward, {"embedding"}, {words},
                                                Target::Class(1), options)[0]
                           .tensors,
                       {words}, Target::Class(1), options);
  EXPECT_LT(delta.abs().max().item<double>(), 1e-4);
}

TEST_F(PathMethodsTest, DrawsAreTheSeedsOnEveryDeviceAndWhateverTheBudget) {
  const Tensor x = Examples();
  ShapOptions options;
  options.n_samples = 7;
  options.stdev = 0.2;
  const auto run = [&](uint64_t seed, const Tensor& input) {
    options.seed = seed;
    return LayerGradientShap(*session_, model(), {"late"}, {input}, {input.narrow(0, 1, 2)},
                             Target::Class(0), options)[0]
        .tensors[0];
  };
  const Tensor first = run(1, x);
  EXPECT_TRUE(SameBytes(run(1, x), first));
  EXPECT_FALSE(at::allclose(run(2, x), first));
  ExpectClose(run(1, x.cpu()), first, 1e-6);
  options.device_budget_bytes = NewBudget(100);
  ExpectClose(run(1, x), first, 1e-6);
}

TEST_F(PathMethodsTest, AModelMayChangeItsInputsInPlace) {
  const Tensor x = Examples(), before = x.clone();
  const AttributedForward plain = [](const Tensors& in) { return (in[0] * 3).tanh().sum(1); };
  const AttributedForward in_place = [](const Tensors& in) {
    return Tap("layer", in[0].mul_(3).tanh()).sum(1);
  };
  ExpectClose(IntegratedGradients(*session_, in_place, {x}, Target()).front(),
              IntegratedGradients(*session_, plain, {x}, Target()).front(), 1e-6);
  const auto not_in_place = [](const Tensors& in) {
    return (Tap("layer", (in[0] * 3).tanh()) * in[1].unsqueeze(1)).sum(1);
  };
  const auto in_place_both = [](const Tensors& in) {
    const Tensor weights = in[1].clone().unsqueeze(1);
    in[1].zero_();
    return (Tap("layer", in[0].mul_(3).tanh()) * weights).sum(1);
  };
  PathOptions path;
  ShapOptions shap;
  path.additional_inputs = shap.additional_inputs = {at::arange(1, kExamples + 1, x.options())};
  const auto lig = [&](const AttributedForward& forward) {
    return LayerIntegratedGradients(*session_, forward, {"layer"}, {x}, Target(), path)[0]
        .tensors[0];
  };
  const auto expected_shap = [&](const AttributedForward& forward) {
    return LayerGradientShap(*session_, forward, {"layer"}, {x}, {x}, Target(), shap)[0].tensors[0];
  };
  ExpectClose(lig(in_place_both), lig(not_in_place), 1e-6);
  ExpectClose(expected_shap(in_place_both), expected_shap(not_in_place), 1e-6);
  EXPECT_TRUE(SameBytes(x.cpu(), before.cpu()));
}

TEST_F(PathMethodsTest, WhatDoesNotFitIsAnErrorThatSaysWhy) {
  const Tensor x = Examples();
  PathOptions options;
  const auto error = [&] {
    return ErrorOf(
        [&] { IntegratedGradients(*session_, model(), {x}, Target::Class(1), options); });
  };
  options.n_steps = 0;
  EXPECT_THAT(error(), HasSubstr("a path of 0 steps: n_steps is at least 1"));
  options.n_steps = 1;
  EXPECT_EQ(error(), "no error");
  options.quadrature = Quadrature::kRiemannTrapezoid;
  EXPECT_THAT(error(), HasSubstr("n_steps is at least 2"));
  options = {};
  options.baselines = {x, x};
  EXPECT_THAT(error(), HasSubstr("there are 2 baselines for 1 inputs"));
  options.baselines = {x.narrow(0, 0, 2)};
  EXPECT_THAT(error(), HasSubstr("a baseline of [2, 4096] for an input of [6, 4096]"));
  options.baselines = {x.cpu()};
  EXPECT_THAT(error(), HasSubstr("put both on one device"));
  options = {};
  options.additional_inputs = {x.narrow(0, 0, 2)};
  EXPECT_THAT(error(), HasSubstr("the first dimension of each counts the examples"));
  options = {};
  const auto flat = [](const Tensors& in) {
    return (Tap("sum", in[0].sum(0, /*keepdim=*/true)) + in[0]).sum(1);
  };
  EXPECT_THAT(ErrorOf([&] { InternalInfluence(*session_, flat, {"sum"}, {x}, Target(), options); }),
              HasSubstr("its first dimension counts the rows of each step"));
  EXPECT_THAT(
      ErrorOf([&] { LayerIntegratedGradients(*session_, flat, {"sum"}, {x}, Target(), options); }),
      HasSubstr("attribute to a layer of one device whose first dimension counts the rows"));
  options.device_budget_bytes = 1 << 30;
  EXPECT_THAT(
      ErrorOf([&] { InternalInfluence(*session_, flat, {"sum"}, {x.cpu()}, Target(), options); }),
      HasSubstr("or nothing runs there; leave device_budget_bytes at 0"));
  options.layers.keep_on_device = true;
  EXPECT_THAT(error(), HasSubstr("results that stay on the device would take from"));
  options = {};
  EXPECT_THAT(
      ErrorOf([&] {
        IntegratedGradients(*session_, model(), {x}, Target::PerExample({1, 2, 3}), options);
      }),
      HasSubstr("there are 3 targets, and 6 examples"));
  ShapOptions shap;
  EXPECT_THAT(
      ErrorOf([&] { LayerGradientShap(*session_, flat, {"sum"}, {x}, {}, Target(), shap); }),
      HasSubstr("there is no distribution of baselines"));
  EXPECT_THAT(ErrorOf([&] {
                LayerGradientShap(*session_, flat, {"sum"}, {x}, {x.narrow(1, 0, 7)}, Target(),
                                  shap);
              }),
              HasSubstr("they are examples like the input's"));
}

TEST_F(PathMethodsTest, DrawsThatDoNotFitAreErrorsThatSayWhy) {
  const Tensor x = Examples();
  ShapOptions options;
  options.n_samples = 2;
  options.stdev = 0.1;
  const ShapDraws fitting = DrawShap({x}, /*baselines=*/3, options);
  const auto error = [&](const std::function<void(ShapDraws&)>& change, Tensors inputs = {}) {
    ShapDraws draws = fitting;
    change(draws);
    if (inputs.empty()) inputs = {x};
    const Tensors baselines(inputs.size(), x.narrow(0, 0, 3));
    return ErrorOf([&] {
      LayerGradientShap(*session_, model(), {"late"}, inputs, baselines, Target::Class(0), options,
                        draws);
    });
  };
  EXPECT_EQ(error([](ShapDraws&) {}), "no error");
  EXPECT_EQ(error([](ShapDraws& draws) { draws.noise.clear(); }), "no error");
  EXPECT_THAT(error([](ShapDraws& draws) { draws.noise.push_back(draws.noise[0]); }),
              HasSubstr("ShapDraws has noise for 2 inputs and 1 are given"));
  EXPECT_THAT(error([](ShapDraws&) {}, {x, x}),
              HasSubstr("ShapDraws has noise for 1 inputs and 2 are given"));
  EXPECT_THAT(error([](ShapDraws& draws) { draws.noise[0] = Tensor(); }),
              HasSubstr("ShapDraws::noise[0] is undefined"));
  EXPECT_THAT(
      error([](ShapDraws& draws) { draws.noise[0] = draws.noise[0].narrow(1, 0, 1); }),
      HasSubstr("ShapDraws::noise[0] is of [12, 1] on cpu: it must be of [12, 4096] on the CPU"));
  EXPECT_THAT(error([](ShapDraws& draws) { draws.baselines = Tensor(); }),
              HasSubstr("ShapDraws::baselines is undefined"));
  EXPECT_THAT(error([&](ShapDraws& draws) { draws.baselines = draws.baselines.to(x.device()); }),
              HasSubstr("ShapDraws::baselines is of [12] on " + x.device().str()));
  EXPECT_THAT(error([](ShapDraws& draws) { draws.baselines = draws.baselines.to(at::kDouble); }),
              HasSubstr("ShapDraws::baselines is of Double: indices are of Long"));
  for (const int64_t index : {-1, 3}) {
    EXPECT_THAT(error([&](ShapDraws& draws) {
                  draws.baselines = draws.baselines.clone();
                  draws.baselines[7].fill_(index);
                }),
                HasSubstr("ShapDraws::baselines has " + std::to_string(index) +
                          " in row 7, and there are 3 baselines: indices are 0 to 2"));
  }
  EXPECT_THAT(error([&](ShapDraws& draws) { draws.coefficients = Tensor(); }),
              HasSubstr("ShapDraws::coefficients is undefined"));
  EXPECT_THAT(
      error([&](ShapDraws&) { options.n_samples = 3; }),
      HasSubstr("ShapDraws::baselines is of [12] on cpu: it must be of [18] on the CPU, one row "
                "for each of 3 samples of 6 examples, as DrawShap makes it"));
  EXPECT_THAT(error([&](ShapDraws&) { options.n_samples = 0; }),
              HasSubstr("0 samples: n_samples is at least 1"));
}

TEST_F(PathMethodsTest, LayersThatNeverRanAreErrorsOrEmptyAsAskedFor) {
  const Tensor x = Examples();
  PathOptions options;
  options.n_steps = 2;
  const auto run = [&] {
    return LayerConductance(*session_, model(), {"never", "late"}, {x}, Target::Class(1), options);
  };
  EXPECT_THAT(ErrorOf(run), HasSubstr("layer \"never\" was not called in forward"));
  options.layers.unused_layers = UnusedLayers::kZeros;
  const auto layers = run();
  EXPECT_FALSE(layers[0].ran);
  EXPECT_TRUE(layers[0].tensors.empty());
  EXPECT_TRUE(layers[1].connected);
  EXPECT_EQ(layers[1].tensors.size(), 1u);
}

TEST(QuadratureTest, GaussLegendreIntegratesPolynomialsOfDegreeTwoNMinusOne) {
  for (const int64_t n : {1, 2, 5, 20, 50, 200}) {
    const PathPoints points = PointsOf(Quadrature::kGaussLegendre, n);
    ASSERT_EQ(points.alphas.size(), static_cast<size_t>(n));
    EXPECT_TRUE(std::is_sorted(points.alphas.begin(), points.alphas.end()));
    const auto degree = static_cast<double>(std::min<int64_t>(2 * n - 1, 9));
    double integral = 0;
    for (size_t i = 0; i < points.alphas.size(); ++i) {
      integral += points.weights[i] * std::pow(points.alphas[i], degree);
    }
    EXPECT_NEAR(integral, 1 / (degree + 1), 1e-7) << n << " weights of float32";
  }
}

}  // namespace
}  // namespace pinion::testing
