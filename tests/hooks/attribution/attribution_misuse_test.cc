// Wrong uses of attribution, a row each: an error that names the value and what to do.
// tests/misuse.md says which tests have the others.

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <c10/core/DeviceType.h>
#include <c10/util/StringUtil.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/gradient_shap.h"
#include "pinion/hooks/attribution/layer_methods.h"
#include "pinion/hooks/attribution/layer_options.h"
#include "pinion/hooks/attribution/path_methods.h"
#include "pinion/hooks/attribution/tap.h"
#include "pinion/hooks/attribution/target.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/error_of.h"

namespace pinion::testing {
namespace attribution_misuse_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Tensors = std::vector<at::Tensor>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

class AttributionMisuseTest : public ::testing::Test {
 protected:
  EmuWorld world_;
  const std::shared_ptr<AttributionSession> session_ =
      AttributionSession::Create(SmallTier(), world_.backend()).value();
  const Tensors x_ = {at::ones({2, 3}).to(world_.device())};
  const std::vector<std::string> layers_ = {"layer"};
};

TEST_F(AttributionMisuseTest, AnEmptyForwardFunctionIsRefusedByEachMethod) {
  AttributionSession& session = *session_;
  const Target first = Target::Class(0);
  const AttributedForward none;
  const struct {
    const char* name;
    std::function<void()> call;
  } rows[] = {
      {"ComputeLayerGradientsAndEval",
       [&] { session.ComputeLayerGradientsAndEval(none, layers_, x_, first); }},
      {"EvalLayers", [&] { session.EvalLayers(none, layers_, x_); }},
      {"LayerActivation", [&] { LayerActivation(session, none, layers_, x_); }},
      {"LayerGradientXActivation",
       [&] { LayerGradientXActivation(session, none, layers_, x_, first); }},
      {"LayerGradCam", [&] { LayerGradCam(session, none, layers_, x_, first); }},
      {"Saliency", [&] { Saliency(session, none, x_, first); }},
      {"InputXGradient", [&] { InputXGradient(session, none, x_, first); }},
      {"IntegratedGradients", [&] { IntegratedGradients(session, none, x_, first); }},
      {"LayerIntegratedGradients",
       [&] { LayerIntegratedGradients(session, none, layers_, x_, first); }},
      {"InternalInfluence", [&] { InternalInfluence(session, none, layers_, x_, first); }},
      {"LayerConductance", [&] { LayerConductance(session, none, layers_, x_, first); }},
      {"ConvergenceDelta", [&] { ConvergenceDelta(session, none, x_, x_, first); }},
      {"LayerGradientShap", [&] { LayerGradientShap(session, none, layers_, x_, x_, first); }},
  };
  for (const auto& row : rows) {
    EXPECT_THAT(ErrorOf(row.call), HasSubstr("the forward function is empty")) << row.name;
  }
}

TEST_F(AttributionMisuseTest, TensorsThatAreUndefinedOrMissingAreRefused) {
  AttributionSession& session = *session_;
  const Target first = Target::Class(0);
  const auto nothing = [](const Tensors&) { return at::Tensor(); };
  const auto same = [](const Tensors& x) { return x[0]; };
  const struct {
    const char* name;
    std::function<void()> call;
    const char* message;
  } rows[] = {
      {"no output", [&] { Saliency(session, nothing, x_, first); },
       "return one number per example"},
      {"no inputs", [&] { Saliency(session, same, {}, first); }, "no input to attribute to"},
      {"no inputs of a path", [&] { IntegratedGradients(session, same, {}, first); },
       "no input to attribute to"},
      {"an undefined input", [&] { Saliency(session, same, {at::Tensor()}, first); }, "input 0"},
      {"an undefined input of a path",
       [&] { IntegratedGradients(session, same, {at::Tensor()}, first); }, "input"},
      {"nothing to concatenate", [&] { session.Concatenate({}); }, "no tensors to concatenate"},
      {"no attributions", [&] { ConvergenceDelta(session, same, {}, x_, first); },
       "no attributions: give"},
      {"an undefined attribution",
       [&] { ConvergenceDelta(session, same, {at::Tensor()}, x_, first); },
       "attribution 0 is undefined"},
      {"an undefined target", [] { Target::Of(at::Tensor()); }, "a target is one integer"},
      {"no targets", [&] { Saliency(session, same, x_, Target::PerExample({})); }, "0 targets"},
      {"a class that there is not", [&] { Saliency(session, same, x_, Target::Class(3)); },
       "the target is index 3 in dimension 1, and the output of [2, 3] has 0 to 2 there: give"},
      {"a negative class", [&] { Saliency(session, same, x_, Target::Class(-1)); },
       "the target is index -1 in dimension 1, and the output of [2, 3] has 0 to 2 there: give"},
      {"no classes", [&] { Saliency(session, same, x_, Target::Index({})); }, "selects one"},
  };
  for (const auto& row : rows) EXPECT_THAT(ErrorOf(row.call), HasSubstr(row.message)) << row.name;
}

TEST_F(AttributionMisuseTest, ATensorThatIsUndefinedIsRefusedByWhatItIsOf) {
  AttributionSession& session = *session_;
  const Target first = Target::Class(0);
  const auto tapped = [](const Tensors& x) {
    Tap("layer", at::Tensor());
    return x[0];
  };
  const auto forward = [](const Tensors& x) { return Tap("layer", x[0] * 2); };
  LayerCallbacks replace, output;
  replace.replace =
      output.output_function = [](LayerPart, const at::Tensor&) { return at::Tensor(); };
  const struct {
    const char* name;
    std::function<void()> call;
    const char* message;
  } rows[] = {
      {"the one part", [&] { session.Concatenate({at::Tensor()}); },
       "tensor 0 to concatenate is undefined"},
      {"a part of several",
       [&] {
         session.Concatenate({x_[0], at::Tensor()});
       },
       "tensor 1 to concatenate is undefined"},
      {"a tap", [&] { session.EvalLayers(tapped, layers_, x_); },
       "layer \"layer\" was tapped with an undefined tensor"},
      {"a tap with gradients",
       [&] { session.ComputeLayerGradientsAndEval(tapped, layers_, x_, first); },
       "layer \"layer\" was tapped with an undefined tensor"},
      {"replace", [&] { session.EvalLayers(forward, layers_, x_, {}, replace); },
       "layer \"layer\" was tapped with an undefined tensor, or replaced by one"},
      {"output_function", [&] { session.EvalLayers(forward, layers_, x_, {}, output); },
       "output_function returned an undefined tensor"},
  };
  for (const auto& row : rows) EXPECT_THAT(ErrorOf(row.call), HasSubstr(row.message)) << row.name;
}

TEST_F(AttributionMisuseTest, AReplacementOfAnotherShapeOrDeviceIsRefused) {
  const auto forward = [](const Tensors& x) { return Tap("layer", x[0] * 2); };
  for (const at::Tensor& other : {at::ones({2, 4}).to(world_.device()), at::ones({2, 3})}) {
    LayerCallbacks callbacks;
    callbacks.replace = [&](LayerPart, const at::Tensor&) { return other; };
    EXPECT_THAT(
        ErrorOf([&] { session_->EvalLayers(forward, layers_, x_, {}, callbacks); }),
        AllOf(HasSubstr("replace returned " + c10::str(other.sizes(), " on ", other.device())),
              HasSubstr("return a tensor of that shape on that device")));
  }
}

TEST_F(AttributionMisuseTest, BaselinesOfAShapOnAnotherDeviceAreRefused) {
  const auto forward = [](const Tensors& x) { return Tap("layer", x[0] * 2); };
  EXPECT_THAT(
      ErrorOf([&] {
        LayerGradientShap(*session_, forward, layers_, x_, {at::ones({2, 3})}, Target::Class(0));
      }),
      AllOf(HasSubstr("baselines on cpu for an input on"), HasSubstr("put both on one")));
}

TEST_F(AttributionMisuseTest, ANameThatNobodyTapsAndNoListenerAndNoTierAreOfUse) {
  const auto forward = [](const Tensors& x) { return Tap("", x[0] * 2); };
  const std::vector<std::string> empty_name = {""};
  EXPECT_EQ(session_->EvalLayers(forward, empty_name, x_).size(), 1u) << "a name as any";
  EXPECT_EQ(session_->EvalLayers(forward, {}, x_).size(), 0u);
  {
    const TapScope silent(nullptr);
    EXPECT_TRUE(Tap("layer", x_[0]).is_same(x_[0]));
    EXPECT_FALSE(Tap("layer", at::Tensor()).defined());
  }
  AttributionSession on_cpu(nullptr, c10::DeviceType::CPU);
  const Tensors ones = {at::ones({2, 3})};
  EXPECT_TRUE(on_cpu.EvalLayers(forward, empty_name, ones)[0].tensors[0].activation.equal(
      at::ones({2, 3}) * 2));
  EXPECT_THAT(ErrorOf([&] { on_cpu.EvalLayers(forward, empty_name, x_); }),
              HasSubstr("create the session with the backend of that device"));
}

TEST_F(AttributionMisuseTest, AMapThatCannotBeResizedIsRefusedByWhatItIs) {
  const at::Tensor map = at::ones({1, 1, 4, 4});
  const struct {
    const char* name;
    at::Tensor map;
    std::vector<int64_t> sizes;
    const char* message;
  } rows[] = {
      {"undefined", at::Tensor(), {8}, "the attribution to interpolate is undefined"},
      {"no space", at::ones({2, 3}), {8}, "an attribution of [2, 3] has no spatial dimensions"},
      {"more space than LibTorch's", at::ones({1, 1, 2, 2, 2, 2}), {8}, "one to three"},
      {"no sizes", map, {}, "0 sizes for the 2 spatial dimensions of [1, 1, 4, 4]: give"},
      {"too many sizes", map, {8, 8, 8}, "3 sizes for the 2 spatial dimensions"},
      {"a size of 0", map, {8, 0}, "interpolation to a size of 0: sizes are at least 1"},
      {"a negative size", map, {-8}, "interpolation to a size of -8: sizes are at least 1"},
  };
  for (const auto& row : rows) {
    EXPECT_THAT(ErrorOf([&] { Interpolate(row.map, row.sizes); }), HasSubstr(row.message))
        << row.name;
  }
}

TEST_F(AttributionMisuseTest, NoiseThatIsNoDeviationIsRefused) {
  for (const double stdev : {-1.0, kInfinity, kNaN}) {
    EXPECT_THAT(ErrorOf([&] { DrawShap(x_, 1, {.stdev = stdev}); }),
                AllOf(HasSubstr("noise of stdev"), HasSubstr("finite and at least 0")));
  }
}

TEST_F(AttributionMisuseTest, InputsThatDoNotCountTheSameExamplesAreNotDrawnFor) {
  const at::Tensor scalar = at::ones({}), one = at::ones({1, 3}), undefined;
  const auto same = [](const Tensors& x) { return x[0]; };
  const struct {
    const char* name;
    Tensors inputs;
    const char* message;
  } rows[] = {
      {"none", {}, "no input to attribute to"},
      {"a scalar", {scalar}, "an input of [] beside a first one of []"},
      {"a scalar behind", {x_[0], scalar}, "an input of [] beside a first one of [2, 3]"},
      {"fewer examples", {x_[0], one}, "an input of [1, 3] beside a first one of [2, 3]"},
      {"undefined", {undefined}, "an undefined tensor"},
      {"undefined behind", {x_[0], undefined}, "an undefined tensor"},
  };
  for (const auto& row : rows) {
    for (const double stdev : {0.0, 0.1}) {
      const ShapOptions options = {.stdev = stdev};
      EXPECT_THAT(ErrorOf([&] { DrawShap(row.inputs, 1, options); }), HasSubstr(row.message))
          << row.name;
      EXPECT_THAT(
          ErrorOf([&] {
            LayerGradientShap(*session_, same, layers_, row.inputs, {one, one}, Target(), options);
          }),
          HasSubstr(row.message))
          << row.name;
    }
  }
}

TEST_F(AttributionMisuseTest, MoreSamplesThanAnyHostHasMemoryForAreRefused) {
  for (const int64_t n_samples : {int64_t{0}, int64_t{-1}, INT64_MIN}) {
    EXPECT_THAT(ErrorOf([&] { DrawShap(x_, 1, {.n_samples = n_samples}); }),
                HasSubstr(std::to_string(n_samples) + " samples: n_samples is at least 1"));
  }
  for (const int64_t n_samples : {(int64_t{1} << 39) + 1, int64_t{1} << 62, INT64_MAX}) {
    EXPECT_THAT(ErrorOf([&] { DrawShap(x_, 1, {.n_samples = n_samples}); }),
                HasSubstr(std::to_string(n_samples) +
                          " samples of 2 examples are more than 2^40 rows: lower n_samples"));
  }
}

TEST_F(AttributionMisuseTest, MoreStepsThanAPathHasPointsAreRefusedByEachMethod) {
  const auto forward = [](const Tensors& x) { return Tap("layer", x[0] * 2); };
  const Target first = Target::Class(0);
  const auto refused = [&](const PathOptions& options, const std::string& message) {
    const std::string errors[] = {
        ErrorOf([&] { IntegratedGradients(*session_, forward, x_, first, options); }),
        ErrorOf([&] { InternalInfluence(*session_, forward, layers_, x_, first, options); }),
        ErrorOf([&] { LayerConductance(*session_, forward, layers_, x_, first, options); }),
        ErrorOf([&] { LayerIntegratedGradients(*session_, forward, layers_, x_, first, options); }),
    };
    for (const std::string& error : errors) EXPECT_THAT(error, HasSubstr(message));
  };
  for (const int64_t n_steps : {int64_t{10'001}, INT64_MAX}) {
    refused({.n_steps = n_steps}, "n_steps is at most 10000, or 2^24 with");
  }
  for (const int64_t n_steps : {(int64_t{1} << 24) + 1, INT64_MAX}) {
    refused({.n_steps = n_steps, .quadrature = Quadrature::kRiemannLeft},
            "n_steps is at most 16777216");
  }
  for (const int64_t n_steps : {int64_t{0}, INT64_MIN}) {
    refused({.n_steps = n_steps}, std::to_string(n_steps) + " steps: n_steps is at least 1");
  }
}

TEST(PointsOfMisuseTest, StepsOrAnOverlapThatAPathCannotHaveAreRefused) {
  const auto points = [](Quadrature quadrature, int64_t n_steps, int64_t overlap) {
    return ErrorOf([&] { PointsOf(quadrature, n_steps, overlap); });
  };
  for (const Quadrature quadrature : {Quadrature::kGaussLegendre, Quadrature::kRiemannTrapezoid}) {
    for (const int64_t overlap : {int64_t{-1}, INT64_MIN, int64_t{3}, INT64_MAX}) {
      EXPECT_THAT(points(quadrature, 2, overlap),
                  HasSubstr("a path of 2 steps and an overlap of " + std::to_string(overlap) +
                            ": overlap is at least 0 and at most n_steps"));
    }
    EXPECT_THAT(points(quadrature, 0, 1), HasSubstr("n_steps is at least 1"));
    EXPECT_THAT(points(quadrature, INT64_MAX, INT64_MAX), HasSubstr("n_steps is at most"));
    EXPECT_EQ(points(quadrature, 2, 2), "no error");
  }
}

TEST_F(AttributionMisuseTest, RowsThatHaveNoTargetAreNotSelected) {
  const struct {
    int64_t begin, count;
  } rows[] = {{-1, 1}, {0, -1}, {0, 4}, {3, 1}, {4, 0}, {1, INT64_MAX}, {INT64_MIN, 1}};
  for (const Target& three :
       {Target::PerExample({0, 1, 2}), Target::IndexPerExample({{0}, {1}, {2}})}) {
    for (const auto& row : rows) {
      EXPECT_THAT(ErrorOf([&] { three.OfRows(row.begin, row.count, 1); }),
                  AllOf(HasSubstr("targets of examples [" + std::to_string(row.begin)),
                        HasSubstr("there are 3 targets: give")));
    }
    for (const int64_t repeats : {int64_t{-1}, int64_t{1} << 27, int64_t{1} << 50, INT64_MAX}) {
      EXPECT_THAT(ErrorOf([&] { three.OfRows(0, 3, repeats); }),
                  HasSubstr("3 examples " + std::to_string(repeats) + " times"));
    }
    EXPECT_EQ(ErrorOf([&] { three.OfRows(1, 2, 0); }), "no error");
    EXPECT_EQ(ErrorOf([&] { three.OfRows(3, 0, 5); }), "no error");
    three.OfRows(1, 2, 2).CheckExamples(4);
  }
}

}  // namespace attribution_misuse_test
}  // namespace pinion::testing
