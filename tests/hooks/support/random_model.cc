#include "pinion/tests/hooks/support/random_model.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tanh.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"

namespace pinion::testing {
namespace {

using Layer = RandomModel::Layer;

constexpr int64_t kMaxRows = 40;
constexpr int kMaxForwards = 2;
constexpr size_t kSteps = 6;  // per run
// Layers that need fewer leave the others without a gradient.
constexpr size_t kParametersPerLayer = 2;
// Keeps values stable through some ten layers.
constexpr double kScale = 0.12;
constexpr double kLearningRate = 0.01;

class Draws {
 public:
  explicit Draws(uint64_t seed) : random_(seed) {}
  uint64_t Below(uint64_t end) { return random_() % end; }
  bool OneIn(uint64_t n) { return Below(n) == 0; }
  Layer AnyLayer() { return static_cast<Layer>(Below(RandomModel::kLayers)); }

 private:
  std::mt19937_64 random_;
};

RandomModel::Step DrawStep(const RandomModel& model, int64_t rows, Draws& draws) {
  RandomModel::Step step;
  step.rows = rows;
  for (const RandomModel::Block& block : model.blocks) {
    step.takes_branch.push_back(block.branch.has_value() && draws.OneIn(2));
  }
  step.forwards = draws.OneIn(4) ? kMaxForwards : 1;
  step.backwards = draws.OneIn(5) ? 2 : 1;
  step.newest_first = draws.OneIn(2);
  return step;
}

bool IsAddedBehind(const RandomModel& model, size_t output, size_t block) {
  return std::any_of(model.blocks.begin() + static_cast<ptrdiff_t>(block) + 1, model.blocks.end(),
                     [output](const RandomModel::Block& later) { return later.skip == output; });
}

}  // namespace

std::string RandomModel::Step::ToString() const {
  std::string text = absl::StrCat(rows, " rows, ", forwards, " forwards, ", backwards,
                                  " backwards each", newest_first ? " newest first" : "", ", ");
  for (const bool takes : takes_branch) text += takes ? '1' : '0';
  return text;
}

RandomModel RandomModel::Draw(uint64_t seed) {
  Draws draws(seed);
  RandomModel model;
  model.seed = seed;
  model.channels = draws.OneIn(2) ? 32 : 64;
  const size_t depth = 2 + draws.Below(9);
  for (size_t i = 0; i < depth; ++i) {
    Block block = {.layer = draws.AnyLayer(), .branch = std::nullopt, .skip = std::nullopt};
    if (draws.OneIn(4)) block.branch = draws.AnyLayer();
    if (i > 0 && draws.OneIn(3)) block.skip = draws.Below(i);
    model.blocks.push_back(block);
  }
  const bool shapes_change = draws.OneIn(2);
  const int64_t rows = 16 + static_cast<int64_t>(draws.Below(kMaxRows - 15));
  for (uint64_t i = 1 + draws.Below(3); i > 0; --i) {
    const int64_t others = 8 + static_cast<int64_t>(draws.Below(kMaxRows - 7));
    model.steps.push_back(DrawStep(model, shapes_change ? others : rows, draws));
  }
  for (size_t i = 0; i < kSteps; ++i) {
    model.order.push_back(i < model.steps.size() ? i : draws.Below(model.steps.size()));
  }
  Draws checkpoints(~seed);  // a separate generator, so that checkpoints do not change the model
  for (Block& block : model.blocks) block.checkpoints = static_cast<int>(checkpoints.Below(3));
  return model;
}

RandomNet::RandomNet(const RandomModel& model, c10::Device device) : model_(model) {
  at::manual_seed(model_.seed);
  const int64_t channels = model_.channels;
  const auto parameter = [&](const at::Tensor& value) {
    parameters_.push_back(value.to(device).detach().requires_grad_(true));
  };
  const auto layer = [&](Layer kind) {
    const int64_t wide = kind == Layer::kWide ? 3 * channels : channels;
    parameter(at::randn({wide, channels}) * kScale);
    parameter(at::randn({channels, wide}) * kScale);
  };
  for (const RandomModel::Block& block : model_.blocks) {
    layer(block.layer);
    if (block.branch.has_value()) layer(*block.branch);
  }
  inputs_ = at::randn({kMaxForwards, kMaxRows, channels}).to(device);
}

at::Tensor RandomNet::Run(Layer layer, const at::Tensor& x, const at::Tensor* parameters) const {
  switch (layer) {
    case Layer::kRelu:
      return at::relu(at::linear(x, parameters[0]));
    case Layer::kGelu:
      return at::gelu(at::linear(x, parameters[0]));
    case Layer::kNorm:
      return at::linear(at::layer_norm(x, {model_.channels}), parameters[0]);
    case Layer::kGate:
      return at::mul(at::tanh(at::linear(x, parameters[0])),
                     at::sigmoid(at::linear(x, parameters[1])));
    case Layer::kSoftmax:
      return at::softmax(at::linear(x, parameters[0]), -1);
    case Layer::kAttention: {
      const at::Tensor scores = at::matmul(at::linear(x, parameters[0]), x.transpose(0, 1));
      return at::matmul(at::softmax(scores * 0.1, -1), at::linear(x, parameters[1]));
    }
    case Layer::kWide:
      return at::linear(at::gelu(at::linear(x, parameters[0])), parameters[1]);
    case Layer::kDropout:
      return at::dropout(at::linear(x, parameters[0]), 0.2, /*train=*/true);
  }
  return x;
}

at::Tensor RandomNet::Loss(const RandomModel::Step& step, int forward) const {
  at::Tensor x = inputs_[forward].narrow(0, 0, step.rows);
  std::vector<at::Tensor> outputs;
  const at::Tensor* parameters = parameters_.data();
  for (size_t i = 0; i < model_.blocks.size(); ++i) {
    const RandomModel::Block& block = model_.blocks[i];
    Layers layers = [this, &block, &step, i, parameters](at::Tensor in) {
      in = Run(block.layer, in, parameters);
      if (step.takes_branch[i]) in = Run(*block.branch, in, parameters + kParametersPerLayer);
      return in;
    };
    for (int n = 0; checkpointing_ && n < block.checkpoints; ++n) {
      layers = [this, inner = std::move(layers)](at::Tensor in) {
        return checkpointing_(inner, std::move(in));
      };
    }
    x = layers(std::move(x));
    parameters += kParametersPerLayer * (block.branch.has_value() ? 2 : 1);
    if (block.skip.has_value()) x = at::add(x, outputs[*block.skip]);
    outputs.push_back(x);
    // Drops outputs that no later block adds, like a program whose variables go out of scope.
    for (size_t output = 0; output <= i; ++output) {
      if (!IsAddedBehind(model_, output, i)) outputs[output].reset();
    }
  }
  return at::mul(x, x).mean();
}

Gradients RandomNet::Step(const RandomModel::Step& step,
                          const std::shared_ptr<OffloadSession>& session) {
  SeedGenerators();
  std::vector<at::Tensor> losses;
  Gradients left = {.loss = at::zeros({}), .parameters = {}};
  for (int forward = 0; forward < step.forwards; ++forward) {
    std::optional<OffloadScope> scope;
    if (session != nullptr) scope.emplace(session);
    losses.push_back(Loss(step, forward));
  }
  if (step.newest_first) std::reverse(losses.begin(), losses.end());
  for (at::Tensor& loss : losses) {
    for (int backward = 1; backward <= step.backwards; ++backward) {
      loss.backward({}, /*retain_graph=*/backward < step.backwards);
    }
    left.loss += loss.detach().cpu();
    loss.reset();
  }
  const c10::NoGradGuard no_grad;
  for (at::Tensor& parameter : parameters_) {
    at::Tensor& gradient = parameter.mutable_grad();
    left.parameters.push_back(gradient.defined() ? gradient.cpu() : at::Tensor());
    if (gradient.defined()) parameter.add_(gradient, -kLearningRate);
    gradient.reset();
  }
  return left;
}

}  // namespace pinion::testing
