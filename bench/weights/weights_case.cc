#include "pinion/bench/weights/weights_case.h"

#include <ATen/TensorOperators.h>
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

#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/plan/pack_plan.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/weights/weight_offloader.h"
#include "pinion/programs/accelerator.h"
#include "pinion/programs/run_options.h"

namespace pinion {
namespace {

using Kind = WeightsWay::Kind;
using Tensors = std::vector<at::Tensor>;

constexpr int kDevice = 0;
constexpr double kLearningRate = 1e-3;
// A schedule learns, and memory is pinned.
constexpr int kWarmupSteps = 6;
constexpr int kTrainingSteps = 3;
constexpr int kInferencePasses = 12;
// A step that the link hides, by the bound.
constexpr double kHidden = 1.01;
constexpr int kTargetPercents[] = {50, 75};
uint64_t LayerBytes() {
  return kModelWidth * kModelWidth * sizeof(float) +
         AlignUp(kModelWidth * sizeof(float), kPackAlignmentBytes);
}

struct LayerImpl : torch::nn::Module {
  LayerImpl() : linear(register_module("linear", torch::nn::Linear(kModelWidth, kModelWidth))) {}
  at::Tensor forward(const at::Tensor& x) { return x + at::relu(linear(x)); }
  torch::nn::Linear linear;
};
TORCH_MODULE(Layer);

// Waves: the same in every process, and no two layers alike.
at::Tensor Waves(at::IntArrayRef shape, double phase) {
  return at::sin(at::arange(c10::multiply_integers(shape), at::kFloat) * 0.37 + phase).view(shape);
}

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

// A model where its way puts it.
class Trainee {
 public:
  virtual ~Trainee() = default;
  // Training: until nobody needs the graph any more.
  virtual at::Tensor Forward(at::Tensor x) = 0;
  // Blocks until gradients are where the optimizer is.
  virtual void Settle() {}
  virtual void Step() = 0;
  virtual Tensors Weights() const = 0;
};

at::Tensor RunLayers(const torch::nn::ModuleList& layers, at::Tensor x) {
  for (const auto& layer : *layers) x = layer->as<LayerImpl>()->forward(x);
  return x;
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

// A layer's gradient on its way to pinned memory, while the host waits.
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

// One layer's weights are on the device at a time. Gradients stay in the pinned memory of the
// first step, which the later ones fill again.
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
        if (layer > 0) Fetch(layer);  // nobody asks for the gradient of the input
      });
    }
    return x;
  }
  void Step() override {
    optimizer_->step();
    uint64_t bytes = 0;
    for (const at::Tensor& master : masters_) bytes += master.nbytes();
    accelerator_.machine()->device(kDevice)->ChargeHostArithmetic(3 * bytes);
  }
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
      // Of a version of its own: what autograd has saved of the weight stays valid.
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

class Visiting final : public Trainee {
 public:
  // `session`: null if activations stay.
  Visiting(torch::nn::ModuleList layers, std::unique_ptr<WeightOffloader> weights,
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
    weights_->Step([this] { optimizer_.step(); });
    weights_->ZeroGrad();
  }
  Tensors Weights() const override { return weights_->host_parameters(); }

 private:
  torch::nn::ModuleList layers_;
  const std::unique_ptr<WeightOffloader> weights_;
  const std::shared_ptr<OffloadSession> session_;
  torch::optim::SGD optimizer_;
};

absl::StatusOr<std::unique_ptr<Trainee>> MakeTrainee(const WeightsWay& way, uint64_t target_bytes,
                                                     Accelerator& accelerator) {
  if (way.kind == Kind::kNone) return std::make_unique<OnDevice>(accelerator);
  if (way.kind == Kind::kBlocking) return std::make_unique<ByHand>(accelerator);
  std::shared_ptr<OffloadSession> session;
  if (way.kind == Kind::kShared) {
    OffloadOptions offload;
    offload.memory_target_bytes = target_bytes;
    PINION_ASSIGN_OR_RETURN(session, OffloadSession::Create(offload, accelerator.backend()));
    // Measures the link, which takes memory of its own.
    PINION_RETURN_IF_ERROR(session->Reserve(kDevice, kMiB));
  }
  torch::nn::ModuleList layers = MakeModel();
  WeightOptions options;
  options.window_bytes = way.window_layers * LayerBytes();
  options.memory_target_bytes = target_bytes;
  PINION_ASSIGN_OR_RETURN(
      std::unique_ptr<WeightOffloader> weights,
      WeightOffloader::Attach(*layers, accelerator.device(), accelerator.backend(), options));
  return std::make_unique<Visiting>(std::move(layers), std::move(weights), std::move(session));
}

bool SameBits(const Tensors& a, const Tensors& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& x, const at::Tensor& y) { return x.equal(y); });
}

}  // namespace

std::string WeightsWay::name() const {
  if (kind == Kind::kNone) return "no offload";
  if (kind == Kind::kBlocking) return "blocking";
  if (kind == Kind::kVisiting) return absl::StrCat("visiting, ", window_layers, " layers");
  return absl::StrCat("target ", target_percent, " %", kind == Kind::kShared ? ", shared" : "");
}

absl::StatusOr<WeightsCase> WeightsCase::Create(const std::string& preset, int64_t batch,
                                                bool training) {
  WeightsCase of;
  of.preset_name_ = preset;
  PINION_ASSIGN_OR_RETURN(const DevicePreset base, FindPreset(preset));
  // FLOPs of a step per byte of a weight, in proportion to the batch; all tensors shrink alike.
  of.preset_ = ScalePreset(
      base,
      {.flops_per_saved_byte = kModelScale, .mean_saved_tensor_bytes = kModelScale * kModelScale},
      {.flops_per_saved_byte = 1, .mean_saved_tensor_bytes = 1});
  of.batch_ = batch;
  of.training_ = training;
  return of;
}

absl::StatusOr<WeightsCase::Outcome> WeightsCase::Run(const WeightsWay& way,
                                                      uint64_t target_bytes) const {
  RunOptions options;
  options.preset = preset_;
  PINION_ASSIGN_OR_RETURN(Accelerator accelerator, Accelerator::Open(options));
  EmulatedMachine& machine = *accelerator.machine();
  try {
    PINION_ASSIGN_OR_RETURN(const std::unique_ptr<Trainee> trainee,
                            MakeTrainee(way, target_bytes, accelerator));
    const at::Tensor x = Waves({batch_, kModelWidth}, 0).to(accelerator.device());
    const at::AutoGradMode grad(training_);
    Outcome outcome;
    WeightsCost& cost = outcome.cost;
    Tensors results;  // on the device
    const auto computed_ms = [&] { return machine.time_stats(kDevice).compute_busy_ms; };
    double phase_ms = 0, step_ms = 0, compute_ms = 0;
    const auto step = [&] {
      const double begin_ms = machine.now_ms();
      const double computed_before_ms = computed_ms();
      at::Tensor result = trainee->Forward(x);
      if (way.kind == Kind::kNone) {
        outcome.others_bytes =
            machine.memory_stats(kDevice).in_use_bytes - kModelLayers * LayerBytes();
      }
      if (training_) {
        result = result.pow(2).mean();
        result.backward();
        trainee->Settle();
        accelerator.Synchronize();
        result = result.detach();
      }
      results.push_back(std::move(result));
      const double end_ms = machine.now_ms();
      compute_ms += computed_ms() - computed_before_ms;
      if (training_) trainee->Step();
      phase_ms += end_ms - begin_ms;
      step_ms += machine.now_ms() - end_ms;
    };
    for (int i = 0; i < kWarmupSteps; ++i) step();
    results.clear();
    // What forward computes, apart from backward.
    if (way.kind == Kind::kNone) {
      accelerator.Synchronize();
      machine.ResetTimeStats(kDevice);
      const at::NoGradGuard no_grad;
      trainee->Forward(x);
      accelerator.Synchronize();
      outcome.compute.forward_us = computed_ms() * 1e3;
    }
    // What a step of the optimizer has put on its way for the next forward stays under way.
    if (!training_) accelerator.Synchronize();
    machine.ResetPeakMemory(kDevice);
    machine.ResetTimeStats(kDevice);
    phase_ms = step_ms = compute_ms = 0;
    const int steps = training_ ? kTrainingSteps : kInferencePasses;
    const double begin_ms = machine.now_ms();
    for (int i = 0; i < steps; ++i) {
      if (!training_) results.clear();
      step();
    }
    if (!training_) {  // passes follow each other without a pause
      accelerator.Synchronize();
      phase_ms = machine.now_ms() - begin_ms;
      compute_ms = computed_ms();
    }
    cost.phase_us = phase_ms * 1e3 / steps;
    cost.host_step_us = step_ms * 1e3 / steps;
    cost.compute_us = compute_ms * 1e3 / steps;
    const TimeStats times = machine.time_stats(kDevice);
    cost.fetched_bytes = times.h2d_bytes / steps;
    cost.gradient_bytes = times.d2h_bytes / steps;
    cost.peak_bytes = machine.memory_stats(kDevice).peak_bytes;
    outcome.compute.backward_us = cost.compute_us - outcome.compute.forward_us;
    for (const at::Tensor& result : results) outcome.values.push_back(result.cpu());
    for (const at::Tensor& weight : trainee->Weights()) {
      outcome.values.push_back(weight.detach().cpu().clone());
    }
    return outcome;
  } catch (const std::exception& error) {
    return absl::InternalError(absl::StrCat(way.name(), " on ", preset_name_, ": ", error.what()));
  }
}

absl::StatusOr<std::vector<WeightsRow>> WeightsCase::RunAll() const {
  std::vector<WeightsRow> rows;
  PINION_ASSIGN_OR_RETURN(const Outcome none, Run({}));
  const auto add = [&](const WeightsWay& way, const Outcome& outcome, uint64_t target_bytes) {
    rows.push_back({.preset = preset_name_,
                    .batch = batch_ * kModelScale,
                    .training = training_,
                    .way = way,
                    .cost = outcome.cost,
                    .target_bytes = target_bytes,
                    .bound = {},
                    .same_values = SameBits(none.values, outcome.values)});
  };
  add({}, none, 0);
  std::vector<WeightsWay> ways = {{.kind = Kind::kBlocking}};
  for (const int window_layers : {2, 4, kModelLayers / 2}) {
    ways.push_back({Kind::kVisiting, window_layers});
  }
  for (const Kind kind : {Kind::kTarget, Kind::kShared}) {
    if (kind == Kind::kShared && !training_) continue;
    for (const int percent : kTargetPercents) {
      ways.push_back({.kind = kind, .target_percent = percent});
    }
  }
  for (const WeightsWay& way : ways) {
    const uint64_t target_bytes = none.cost.peak_bytes * way.target_percent / 100;
    PINION_ASSIGN_OR_RETURN(const Outcome outcome, Run(way, target_bytes));
    add(way, outcome, target_bytes);
    if (!way.visits()) continue;
    WeightsRow& row = rows.back();
    row.bound = BoundOf(row, none);
    row.is_hidden = row.bound.overlapped_us <= kHidden * none.cost.compute_us;
  }
  return rows;
}

PhaseBound WeightsCase::BoundOf(const WeightsRow& row, const Outcome& none) const {
  if (row.way.kind == Kind::kShared) {
    return SharedBound(preset_.link, LayerBytes(), kModelLayers, none.others_bytes,
                       row.target_bytes, none.compute);
  }
  int window_layers = row.way.window_layers;
  if (row.way.kind == Kind::kTarget) {
    // In training the most of the others is there when forward ends; in inference at any time.
    const uint64_t others_bytes =
        training_ ? none.others_bytes : none.cost.peak_bytes - kModelLayers * LayerBytes();
    const uint64_t left_bytes = row.target_bytes - std::min(row.target_bytes, others_bytes);
    window_layers = std::min(kModelLayers, static_cast<int>(left_bytes / LayerBytes()));
  }
  return training_
             ? TrainingBound(preset_.link, LayerBytes(), kModelLayers, window_layers, none.compute)
             : InferenceBound(preset_.link, LayerBytes(), kModelLayers, window_layers,
                              none.cost.compute_us);
}

}  // namespace pinion
