#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sin.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/weights/weights_case.h"
#include "pinion/device/host_arithmetic.h"
#include "pinion/engine/link/packing.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/weights/weight_offloader.h"
#include "pinion/programs/accelerator.h"

namespace pinion {
namespace {

using Kind = WeightsWay::Kind;

constexpr double kLearningRate = 1e-3;

struct LayerImpl : torch::nn::Module {
  LayerImpl() : linear(register_module("linear", torch::nn::Linear(kModelWidth, kModelWidth))) {}
  at::Tensor forward(const at::Tensor& x) { return x + at::relu(linear(x)); }
  torch::nn::Linear linear;
};
TORCH_MODULE(Layer);

torch::nn::ModuleList MakeModel() {
  torch::nn::ModuleList layers;
  for (int i = 0; i < kModelLayers; ++i) layers->push_back(Layer());
  const at::NoGradGuard no_grad;
  double phase = 0;
  for (at::Tensor& weight : layers->parameters()) {
    weight.copy_(Waves(weight.sizes(), ++phase) * 0.01);
  }
  return layers;
}

at::Tensor RunLayers(const torch::nn::ModuleList& layers, at::Tensor x) {
  for (const auto& layer : *layers) x = layer->as<LayerImpl>()->forward(x);
  return x;
}

// Runs a step of SGD on the host, which reads gradients, and reads and writes weights.
void StepOnHost(torch::optim::SGD& optimizer, const Tensors& masters) {
  optimizer.step();
  for (const at::Tensor& master : masters) CountHostArithmetic(3 * master.nbytes());
}

class OnDevice final : public Trainee {
 public:
  explicit OnDevice(Accelerator& accelerator) : accelerator_(accelerator), layers_(MakeModel()) {
    layers_->to(accelerator.device());
    optimizer_ = std::make_unique<torch::optim::SGD>(layers_->parameters(), kLearningRate);
  }
  at::Tensor Forward(at::Tensor x) override { return RunLayers(layers_, std::move(x)); }
  void Step() override {
    optimizer_->step();
    optimizer_->zero_grad();
    accelerator_.Synchronize();
  }
  Tensors Weights() const override { return layers_->parameters(); }

 private:
  Accelerator& accelerator_;
  torch::nn::ModuleList layers_;
  std::unique_ptr<torch::optim::SGD> optimizer_;
};

// Copies a layer's gradient to pinned memory and blocks the host.
class CopyGradientOut final : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit CopyGradientOut(at::Tensor master) : master_(std::move(master)) {}
  void operator()(const at::Tensor& weight) override {
    const at::NoGradGuard no_grad;
    if (!master_.grad().defined()) master_.mutable_grad() = at::empty_like(master_).pin_memory();
    master_.grad().copy_(weight.grad());
    weight.mutable_grad() = at::Tensor();
  }

 private:
  at::Tensor master_;
};

// Keeps one layer's weights on the device at a time. Later steps reuse the first step's pinned
// gradients.
class ByHand final : public Trainee {
 public:
  explicit ByHand(const Accelerator& accelerator)
      : accelerator_(accelerator), layers_(MakeModel()) {
    for (at::Tensor& weight : layers_->parameters()) {
      at::Tensor master = weight.detach().pin_memory().set_requires_grad(true);
      weight.set_data(weight.detach().to(accelerator.device()));
      torch::autograd::impl::set_post_acc_grad_hooks(weight,
                                                     std::make_unique<CopyGradientOut>(master));
      masters_.push_back(std::move(master));
    }
    for (int layer = 0; layer < kModelLayers; ++layer) Drop(layer);
    optimizer_ = std::make_unique<torch::optim::SGD>(masters_, kLearningRate);
  }
  at::Tensor Forward(at::Tensor x) override {
    for (int layer = 0; layer < kModelLayers; ++layer) {
      Fetch(layer);
      x = layers_[layer]->as<LayerImpl>()->forward(x);
      Drop(layer);
      if (!x.requires_grad()) continue;
      x.register_hook([this, layer](const at::Tensor&) {
        if (layer + 1 < kModelLayers) Drop(layer + 1);
        if (layer > 0) Fetch(layer);  // the input needs no gradient
      });
    }
    return x;
  }
  void Step() override { StepOnHost(*optimizer_, masters_); }
  Tensors Weights() const override { return masters_; }

 private:
  void Fetch(int layer) {
    const at::NoGradGuard no_grad;
    const Tensors weights = layers_[layer]->parameters();
    const c10::DeviceGuard guard(accelerator_.device());
    for (size_t i = 0; i < weights.size(); ++i) {
      const c10::Storage& storage = weights[i].storage();
      storage.unsafeGetStorageImpl()->set_data_ptr_noswap(
          c10::GetAllocator(accelerator_.device().type())->allocate(storage.nbytes()));
      // Writes under another version counter, so that autograd's saved weights stay valid.
      weights[i].variable_data().copy_(masters_[layer * weights.size() + i].detach());
    }
  }
  void Drop(int layer) {
    for (const at::Tensor& weight : layers_[layer]->parameters()) {
      weight.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(
          c10::DataPtr(nullptr, accelerator_.device()));
    }
  }

  const Accelerator& accelerator_;
  torch::nn::ModuleList layers_;
  Tensors masters_;
  std::unique_ptr<torch::optim::SGD> optimizer_;
};

class Streamed final : public Trainee {
 public:
  // `session` is null if activations are not offloaded.
  Streamed(torch::nn::ModuleList layers, std::unique_ptr<WeightOffloader> weights,
           std::shared_ptr<OffloadSession> session)
      : layers_(std::move(layers)),
        weights_(std::move(weights)),
        session_(std::move(session)),
        optimizer_(weights_->host_parameters(), kLearningRate) {}
  at::Tensor Forward(at::Tensor x) override {
    std::optional<OffloadScope> scope;
    if (session_ != nullptr) scope.emplace(session_);
    return RunLayers(layers_, std::move(x));
  }
  void Settle() override { weights_->WaitForGradients(); }
  void Step() override {
    weights_->Step([this] { StepOnHost(optimizer_, weights_->host_parameters()); });
    weights_->ZeroGrad();
  }
  Tensors Weights() const override { return weights_->host_parameters(); }

 private:
  torch::nn::ModuleList layers_;
  const std::unique_ptr<WeightOffloader> weights_;
  const std::shared_ptr<OffloadSession> session_;
  torch::optim::SGD optimizer_;
};

}  // namespace

uint64_t LayerBytes() {
  return kModelWidth * kModelWidth * sizeof(float) +
         AlignUp(kModelWidth * sizeof(float), kPackAlignmentBytes);
}

at::Tensor Waves(at::IntArrayRef shape, double phase) {
  return at::sin(at::arange(c10::multiply_integers(shape), at::kFloat) * 0.37 + phase).view(shape);
}

absl::StatusOr<std::unique_ptr<Trainee>> MakeTrainee(const WeightsWay& way, uint64_t target_bytes,
                                                     Accelerator& accelerator) {
  if (way.kind == Kind::kNone) return std::make_unique<OnDevice>(accelerator);
  if (way.kind == Kind::kBlocking) return std::make_unique<ByHand>(accelerator);
  std::shared_ptr<OffloadSession> session;
  if (way.kind == Kind::kShared) {
    OffloadOptions offload;
    offload.allocator = accelerator.tier_options().allocator;
    offload.memory_target_bytes = target_bytes;
    PINION_ASSIGN_OR_RETURN(session, OffloadSession::Create(offload, accelerator.backend()));
    // Measures the link, which takes pinned memory.
    PINION_RETURN_IF_ERROR(session->Reserve(kTrainedDevice, kMiB));
  }
  torch::nn::ModuleList layers = MakeModel();
  WeightOptions options;
  options.tier = accelerator.tier_options();
  options.window_bytes = way.window_layers * LayerBytes();
  options.memory_target_bytes = target_bytes;
  PINION_ASSIGN_OR_RETURN(
      std::unique_ptr<WeightOffloader> weights,
      WeightOffloader::Attach(*layers, accelerator.device(), accelerator.backend(), options));
  return std::make_unique<Streamed>(std::move(layers), std::move(weights), std::move(session));
}

}  // namespace pinion
