// Compares Pinion's methods with Captum's on the cases of captum_cases.py. captum_cases.json stores
// Captum's answers; an installed Captum is asked again.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tanh.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>
#include <torch/nn/modules/utils.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/gradient_shap.h"
#include "pinion/hooks/attribution/layer_methods.h"
#include "pinion/hooks/attribution/layer_options.h"
#include "pinion/hooks/attribution/path_methods.h"
#include "pinion/hooks/attribution/tap.h"
#include "pinion/hooks/attribution/tapped_module.h"
#include "pinion/hooks/attribution/target.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/support/python_with_torch.h"
#include "pinion/tests/support/run_program.h"

namespace pinion::testing {
namespace {

using at::Tensor;
using nlohmann::json;

// Device bytes in addition to the model: enough for some rows of a case, but not for all.
constexpr uint64_t kBudgetBytes = 64 << 10;

Tensor Numbers(const std::vector<int64_t>& shape, int64_t seed, at::ScalarType dtype) {
  const Tensor i = at::arange(c10::multiply_integers(shape));
  const Tensor mixed = at::remainder(i * i * 3 + i * 7 + seed * 5, 23) - 11;
  return mixed.to(dtype).div(16).view(shape);
}

// Counterparts of modules in captum_cases.py that torch::nn lacks. `name` is the place.
struct ResidualImpl : torch::nn::Module {
  ResidualImpl(const std::string& name, int64_t in, int64_t out)
      : body(torch::nn::Linear(in, out), torch::nn::Tanh()) {
    register_module("body", body);
    taps = std::make_shared<SequentialTaps>(body, name + ".body.");
  }
  Tensor forward(const Tensor& x) { return x + body->forward(x); }
  torch::nn::Sequential body;
  std::shared_ptr<SequentialTaps> taps;
};
TORCH_MODULE(Residual);

struct GateImpl : torch::nn::Module {
  explicit GateImpl(std::string part) : name(std::move(part)) {}
  Tensor forward(const Tensor& x) {
    const std::vector<Tensor> halves =
        Tap(name + ".split", Tap(name + ".split.input", x).chunk(2, 1));
    return at::cat({halves[0] * at::tanh(halves[1]), halves[1]}, 1);
  }
  std::string name;
};
TORCH_MODULE(Gate);

struct TwiceImpl : torch::nn::Module {
  TwiceImpl(const std::string& name, int64_t features)
      : shared(name + ".shared", torch::nn::Linear(features, features)) {
    register_module("shared", shared);
  }
  Tensor forward(const Tensor& x) { return shared->forward(at::tanh(shared->forward(x))); }
  pinion::nn::Tapped shared;
};
TORCH_MODULE(Twice);

struct AgainImpl : torch::nn::Module {
  AgainImpl(const std::string& name, int64_t features)
      : shared(name + ".shared", torch::nn::Linear(features, features)) {
    register_module("shared", shared);
  }
  Tensor forward(const Tensor& x) {
    const Tensor h = shared->forward(x);
    return h + shared->forward(at::tanh(h)) * h;
  }
  pinion::nn::Tapped shared;
};
TORCH_MODULE(Again);

struct AsideImpl : torch::nn::Module {
  explicit AsideImpl(const std::string& name) : unused(name + ".unused", torch::nn::Tanh()) {
    register_module("unused", unused);
  }
  Tensor forward(const Tensor& x) {
    unused->forward(x);
    return at::sin(x);
  }
  pinion::nn::Tapped unused;
};
TORCH_MODULE(Aside);

struct SumImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) { return x.sum(1); }
};
TORCH_MODULE(Sum);

struct GridImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) { return x.view({x.size(0), 2, -1}); }
};
TORCH_MODULE(Grid);

void Append(const json& part, torch::nn::Sequential& model) {
  const std::string kind = part[0], name = std::to_string(model->size());
  const auto size = [&part](size_t i) { return part[i].get<int64_t>(); };
  if (kind == "relu") return model->push_back(torch::nn::ReLU());
  if (kind == "relu_") return model->push_back(torch::nn::ReLU(/*inplace=*/true));
  if (kind == "tanh") return model->push_back(torch::nn::Tanh());
  if (kind == "gelu") return model->push_back(torch::nn::GELU());
  if (kind == "sigmoid") return model->push_back(torch::nn::Sigmoid());
  if (kind == "conv") {
    return model->push_back(
        torch::nn::Conv2d(torch::nn::Conv2dOptions(size(1), size(2), 3).padding(1)));
  }
  if (kind == "pool") {
    return model->push_back(torch::nn::MaxPool2d(torch::nn::MaxPool2dOptions(2).stride(1)));
  }
  if (kind == "flatten") return model->push_back(torch::nn::Flatten());
  if (kind == "linear") return model->push_back(torch::nn::Linear(size(1), size(2)));
  if (kind == "residual") return model->push_back(Residual(name, size(1), size(2)));
  if (kind == "gate") return model->push_back(Gate(name));
  if (kind == "twice") return model->push_back(Twice(name, size(1)));
  if (kind == "again") return model->push_back(Again(name, size(1)));
  if (kind == "aside") return model->push_back(Aside(name));
  if (kind == "sum") return model->push_back(Sum());
  if (kind == "grid") return model->push_back(Grid());
  FAIL() << "no part is called " << kind;
}

Target TargetOf(const json& target) {
  const std::string kind = target[0];
  const json& value = target[1];
  if (kind == "class") return Target::Class(value);
  if (kind == "index") return Target::Index(value);
  if (kind == "per_example") return Target::PerExample(value);
  if (kind == "index_per_example") return Target::IndexPerExample(value);
  if (kind == "none") return Target();
  const std::vector<int64_t> classes = value;
  return Target::Of(at::from_blob(const_cast<int64_t*>(classes.data()),
                                  {static_cast<int64_t>(classes.size())}, at::kLong));
}

// Where a case runs, and with which options.
struct Setting {
  std::string name;
  c10::Device device;
  bool keep_on_device = false;
  std::shared_ptr<OffloadSession> offload = nullptr;  // offloads what the graph saves
  bool has_tier = true;
};

using Tensors = std::vector<Tensor>;

std::vector<Tensors> TensorsOf(const std::vector<LayerAttribution>& layers) {
  std::vector<Tensors> all;
  for (const LayerAttribution& layer : layers) all.push_back(layer.tensors);
  return all;
}

// The arguments of a case along a path.
struct PathCase {
  AttributionSession& session;
  const AttributedForward& forward;
  std::vector<std::string> layers;
  Tensor x;
  Target target;
  LayerOptions layer_options;
  uint64_t device_budget_bytes = 0;
};

Quadrature QuadratureOf(const std::string& name) {
  static const std::map<std::string, Quadrature> all = {
      {"gausslegendre", Quadrature::kGaussLegendre},
      {"riemann_left", Quadrature::kRiemannLeft},
      {"riemann_middle", Quadrature::kRiemannMiddle},
      {"riemann_right", Quadrature::kRiemannRight},
      {"riemann_trapezoid", Quadrature::kRiemannTrapezoid},
  };
  return all.at(name);
}

// captum_cases.py draws all samples of each example, Pinion all examples of each sample.
Tensor BySamples(const Tensor& drawn, int64_t examples) {
  return drawn.unflatten(0, {examples, -1}).transpose(0, 1).flatten(0, 1).contiguous();
}

std::vector<Tensors> ShapAnswer(const json& spec, const PathCase& given) {
  const int64_t seed = spec["seed"], examples = given.x.size(0);
  ShapOptions options;
  options.n_samples = spec["steps"];
  options.multiply_by_inputs = spec["flag"];
  options.device_budget_bytes = given.device_budget_bytes;
  options.layers = given.layer_options;
  std::vector<int64_t> sizes = spec["inputs"];
  sizes[0] = 3;
  const Tensor baselines = Numbers(sizes, seed + 200, given.x.scalar_type()).to(given.x.device());
  sizes[0] = examples * options.n_samples;
  const Tensor i = at::arange(sizes[0]);
  ShapDraws draws;
  draws.baselines = BySamples(at::remainder(i * 7 + seed, 3), examples);
  draws.coefficients = BySamples(at::remainder(i * 5 + seed, 11).to(at::kDouble) / 11, examples);
  if (spec["other_flag"]) {
    draws.noise = {BySamples(Numbers(sizes, seed + 300, given.x.scalar_type()) / 8, examples)};
  }
  return TensorsOf(LayerGradientShap(given.session, given.forward, given.layers, {given.x},
                                     {baselines}, given.target, options, draws));
}

std::vector<Tensors> PathAnswer(const json& spec, const PathCase& given) {
  const std::string method = spec["method"], baseline = spec["baseline"];
  if (method == "gradient_shap") return ShapAnswer(spec, given);
  PathOptions options;
  options.n_steps = spec["steps"];
  options.quadrature = QuadratureOf(spec["quadrature"]);
  options.multiply_by_inputs = spec["flag"];
  options.device_budget_bytes = given.device_budget_bytes;
  options.layers = given.layer_options;
  if (baseline != "zeros") {
    std::vector<int64_t> sizes = spec["inputs"];
    if (baseline == "one") sizes[0] = 1;
    const int64_t seed = spec["seed"];
    options.baselines = {Numbers(sizes, seed + 200, given.x.scalar_type()).to(given.x.device())};
  }
  const Tensors inputs = {given.x};
  if (method == "internal_influence") {
    return TensorsOf(InternalInfluence(given.session, given.forward, given.layers, inputs,
                                       given.target, options));
  }
  std::vector<Tensors> answer;
  if (method == "integrated_gradients") {
    answer = {IntegratedGradients(given.session, given.forward, inputs, given.target, options)};
  } else if (method == "layer_conductance") {
    answer = TensorsOf(LayerConductance(given.session, given.forward, given.layers, inputs,
                                        given.target, options));
  } else {
    answer = TensorsOf(LayerIntegratedGradients(given.session, given.forward, given.layers, inputs,
                                                given.target, options));
  }
  const Tensor delta =
      ConvergenceDelta(given.session, given.forward, answer[0], inputs, given.target, options);
  const c10::Device device = given.layer_options.keep_on_device ? given.x.device() : at::kCPU;
  answer.push_back({delta.to(device)});
  return answer;
}

std::vector<Tensors> Answer(const json& spec, at::ScalarType dtype, const Setting& setting,
                            AttributionSession& session) {
  torch::nn::Sequential model;
  for (const json& part : spec["model"]) Append(part, model);
  const int64_t seed = spec["seed"];
  model->to(setting.device, dtype);
  {
    const at::NoGradGuard no_grad;
    int64_t i = 0;
    for (Tensor& parameter : model->parameters()) {
      parameter.copy_(Numbers(parameter.sizes().vec(), seed + i++, dtype));
      parameter.set_requires_grad(!spec["frozen"].get<bool>());
    }
  }
  const SequentialTaps taps(model);
  const Tensor x = Numbers(spec["inputs"], seed + 100, dtype).to(setting.device);
  const AttributedForward forward = [&](const Tensors& inputs) {
    std::optional<OffloadScope> scope;
    if (setting.offload != nullptr) scope.emplace(setting.offload, *model);
    return model->forward(inputs[0]);
  };
  std::vector<std::string> layers = spec["layers"];
  if (spec["to_input"]) {
    for (std::string& layer : layers) layer += ".input";
  }
  const Target target = TargetOf(spec["target"]);
  const bool flag = spec["flag"], other_flag = spec["other_flag"];
  LayerOptions options;
  options.unused_layers = UnusedLayers::kZeros;
  options.keep_on_device = setting.keep_on_device;
  const std::string method = spec["method"];
  std::vector<Tensors> answer;
  if (spec.contains("steps")) {
    uint64_t budget_bytes = 0;
    const bool on_host = !setting.device.is_cpu() && !setting.keep_on_device;
    if (spec["batched"] && on_host) {
      budget_bytes = static_cast<uint64_t>(AllocatedBytes(setting.device)) + kBudgetBytes;
    }
    answer = PathAnswer(spec, {session, forward, layers, x, target, options, budget_bytes});
  } else if (method == "primitive") {
    const auto results =
        session.ComputeLayerGradientsAndEval(forward, layers, {x}, target, options);
    std::vector<Tensors> gradients;
    for (const LayerResult& layer : results) {
      answer.emplace_back();
      gradients.emplace_back();
      for (const LayerTensor& tensor : layer.tensors) {
        answer.back().push_back(tensor.activation);
        gradients.back().push_back(tensor.gradient);
      }
    }
    answer.insert(answer.end(), gradients.begin(), gradients.end());
  } else if (method == "activation") {
    answer = TensorsOf(LayerActivation(session, forward, layers, {x}, options));
  } else if (method == "gradient_x_activation") {
    answer =
        TensorsOf(LayerGradientXActivation(session, forward, layers, {x}, target, options, flag));
  } else if (method == "grad_cam") {
    answer = TensorsOf(LayerGradCam(session, forward, layers, {x}, target, options,
                                    {.relu_attributions = flag, .sum_channels = other_flag}));
    for (Tensors& tensors : answer) {
      if (tensors[0].dim() != 4) continue;
      tensors.push_back(Interpolate(tensors[0], {5, 7}, torch::kBilinear));
      tensors.push_back(Interpolate(tensors[0], {6}));
    }
  } else if (method == "saliency") {
    answer = {Saliency(session, forward, {x}, target, options, flag)};
  } else {
    answer = {InputXGradient(session, forward, {x}, target, options)};
  }
  EXPECT_TRUE(x.is_leaf() && !x.requires_grad()) << "the input is as it was";
  for (const Tensor& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined());
  return answer;
}

void ExpectNear(const json& expected, const Tensor& actual, const Setting& setting) {
  EXPECT_FALSE(actual.requires_grad());
  EXPECT_EQ(actual.device(), setting.keep_on_device ? setting.device : c10::Device(at::kCPU));
  const std::vector<int64_t> shape = expected["shape"];
  ASSERT_EQ(actual.sizes().vec(), shape);
  const bool is_double = actual.scalar_type() == at::kDouble;
  const Tensor values = actual.to(at::kCPU, at::kDouble).contiguous();
  const std::vector<double> wanted = expected["values"];
  for (size_t i = 0; i < wanted.size(); ++i) {
    const double bound =
        is_double ? 1e-12 + 1e-10 * std::abs(wanted[i]) : 1e-6 + 1e-5 * std::abs(wanted[i]);
    ASSERT_NEAR(values.const_data_ptr<double>()[i], wanted[i], bound) << "element " << i;
  }
}

void ExpectSameAs(const json& cases) {
  ASSERT_GE(cases.size(), 99u);
  OffloadOptions offload = SmallWindows(/*window_bytes=*/64);
  offload.min_offload_bytes = 1;
  EmuWorld world(MachineOptions(), offload);
  const auto session =
      AttributionSession::Create({offload.allocator, offload.engine}, world.backend()).value();
  AttributionSession without_tier(nullptr, world.device().type());
  const std::vector<Setting> settings = {
      {"on the host", world.device()},
      {"kept on the device", world.device(), /*keep_on_device=*/true},
      {"in an OffloadScope", world.device(), /*keep_on_device=*/false, world.session()},
      {"of a model on the CPU", c10::Device(at::kCPU)},
      {"without a tier", world.device(), /*keep_on_device=*/false, nullptr, /*has_tier=*/false},
  };
  for (const json& spec : cases) {
    SCOPED_TRACE(::testing::Message() << "seed " << spec["seed"] << ": " << spec["method"]);
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      const json& expected = spec[dtype == at::kFloat ? "float32" : "float64"];
      for (const Setting& setting : settings) {
        SCOPED_TRACE(setting.name);
        const std::vector<Tensors> actual =
            Answer(spec, dtype, setting, setting.has_tier ? *session : without_tier);
        if (expected.is_null()) continue;  // Captum raises an error; Pinion returns zeros
        ASSERT_EQ(actual.size(), expected.size());
        for (size_t layer = 0; layer < actual.size(); ++layer) {
          ASSERT_EQ(actual[layer].size(), expected[layer].size());
          for (size_t i = 0; i < actual[layer].size(); ++i) {
            SCOPED_TRACE(::testing::Message() << "layer " << layer << ", tensor " << i);
            ExpectNear(expected[layer][i], actual[layer][i], setting);
          }
        }
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
  const OffloadStats stats = world.QuietStats();
  EXPECT_GT(stats.offloaded, 0u);
  EXPECT_GT(stats.unpacked, 0u);
}

TEST(CaptumTest, EachCaseIsWhatCaptumHasAnswered) {
  ExpectSameAs(json::parse(FileContents("tests/hooks/attribution/captum_cases.json")));
}

TEST(CaptumTest, EachCaseIsWhatCaptumAnswers) {
  const std::string python = PythonWithTorch(
      "torch, tqdm, packaging; import importlib.util as u; assert u.find_spec(\"captum\")");
  if (python.empty()) GTEST_SKIP() << kNoPythonWithTorch;
  const ProgramOutcome run = RunProgram(python + " -B tests/hooks/attribution/captum_cases.py");
  ASSERT_EQ(run.exit_code, 0) << run.err;
  ExpectSameAs(json::parse(run.out));
}

}  // namespace
}  // namespace pinion::testing
