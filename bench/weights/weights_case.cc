#include "pinion/bench/weights/weights_case.h"

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

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/host_arithmetic.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/link/packing.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/weights/weight_offloader.h"
#include "pinion/programs/accelerator.h"
#include "pinion/programs/run_options.h"

namespace pinion {
namespace {

constexpr int64_t kModelScale = 32;
constexpr int64_t kModelWidth = 256;
constexpr int kTrainedDevice = 0;

// On the device.
uint64_t LayerBytes() {
  return kModelWidth * kModelWidth * sizeof(float) +
         AlignUp(kModelWidth * sizeof(float), kPackAlignmentBytes);
}

// Returns the same values in every process, and other values for each phase.
at::Tensor Waves(at::IntArrayRef shape, double phase) {
  return at::sin(at::arange(c10::multiply_integers(shape), at::kFloat) * 0.37 + phase).view(shape);
}

// A model with a placement of its weights.
class Trainee {
 public:
  virtual ~Trainee() = default;
  // In training, valid until the graph is freed.
  virtual at::Tensor Forward(at::Tensor x) = 0;
  // Blocks until gradients are where the optimizer is.
  virtual void Settle() {}
  virtual void Step() = 0;
  virtual std::vector<at::Tensor> Weights() const = 0;
};

using Kind = WeightsWay::Kind;
using Tensors = std::vector<at::Tensor>;

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

// `target_bytes` is the memory target of kTarget and kShared. The accelerator outlives the trainee.
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

LinkRates RatesOf(const LinkModel& link) {
  constexpr double kBytesPerUs = 1e3;  // of one GB/s
  return {.out = link.d2h_gb_per_s * kBytesPerUs,
          .in = link.h2d_gb_per_s * kBytesPerUs,
          .duplex_out = link.d2h_duplex_gb_per_s * kBytesPerUs,
          .duplex_in = link.h2d_duplex_gb_per_s * kBytesPerUs};
}

struct ComputeTimes {
  double forward_us = 0;
  double backward_us = 0;
};

// Lower bounds on the time of forward and backward for layer-by-layer weight streaming that keeps
// the link busy. `window_layers` of the layers fit on the device.
//
// A training step begins with no layer on the device, since the optimizer changed all. When
// backward begins the window is full. Backward does not need the first layer's weights.
PhaseBound TrainingBound(const LinkModel& link, int window_layers, const ComputeTimes& compute) {
  const LinkRates rates = RatesOf(link);
  const auto bytes = [](int layers) { return static_cast<double>(LayerBytes()) * layers; };
  const double others = bytes(kModelLayers - 1);
  const double fetched_backward = bytes(std::max(kModelLayers - 1 - window_layers, 0));
  return {.ends_us = LinkUs(0, bytes(1), rates) + LinkUs(bytes(1), 0, rates),
          .overlapped_us = std::max(compute.forward_us, LinkUs(0, others, rates)) +
                           std::max(compute.backward_us, LinkUs(others, fetched_backward, rates))};
}

// The same if `saved_bytes` of activations can be offloaded within the same memory. Backward
// fetches the bytes of both beyond that memory. Forward offloads the activations that do not fit
// beside the layer in use.
PhaseBound SharedBound(const LinkModel& link, uint64_t saved_bytes, uint64_t memory_bytes,
                       const ComputeTimes& compute) {
  const LinkRates rates = RatesOf(link);
  const auto layer = static_cast<double>(LayerBytes());
  const auto saved = static_cast<double>(saved_bytes);
  const auto memory = static_cast<double>(memory_bytes);
  const double others = layer * (kModelLayers - 1);
  const double leave = std::max(0.0, saved + layer - memory);
  const double come_back = std::max(0.0, saved + others - memory);
  return {.ends_us = LinkUs(0, layer, rates) + LinkUs(layer, 0, rates),
          .overlapped_us = std::max(compute.forward_us, LinkUs(leave, others, rates)) +
                           std::max(compute.backward_us, LinkUs(others, come_back, rates))};
}

// Inference hides all fetches behind compute. With room for w of n layers every eviction order
// fetches at least n * (n - w) / (n - 1) layers (Belady). One layer is always in flight on a busy
// link, so w is the window less one.
PhaseBound InferenceBound(const LinkModel& link, int window_layers, double compute_us) {
  const int room = window_layers < kModelLayers ? window_layers - 1 : kModelLayers;
  const double fetched_layers =
      static_cast<double>(kModelLayers) * (kModelLayers - room) / (kModelLayers - 1);
  const double fetched_bytes = fetched_layers * static_cast<double>(LayerBytes());
  return {.ends_us = 0,
          .overlapped_us = std::max(compute_us, LinkUs(0, fetched_bytes, RatesOf(link)))};
}

// Warm-up: the schedule is learned and memory pinned.
constexpr int kWarmupSteps = 6;
constexpr int kTrainingSteps = 3;
constexpr int kInferencePasses = 12;
// At most this bound over compute: the link hides the weights.
constexpr double kHidden = 1.01;
constexpr int kTargetPercents[] = {50, 75};

bool SameBits(const Tensors& a, const Tensors& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& x, const at::Tensor& y) { return x.equal(y); });
}

class WeightsCase {
 public:
  // `batch` examples of the small model. NotFound names all presets.
  static absl::StatusOr<WeightsCase> Create(const std::string& preset, int64_t batch,
                                            bool training);

  // Runs every placement, no offload first.
  absl::StatusOr<std::vector<WeightsRow>> RunAll() const;

 private:
  struct Outcome {
    WeightsCost cost;
    ComputeTimes compute;
    uint64_t others_bytes = 0;       // without offload, at the end of forward
    std::vector<at::Tensor> values;  // in pageable memory
  };

  WeightsCase() = default;
  absl::StatusOr<Outcome> Run(const WeightsWay& way, uint64_t target_bytes = 0) const;
  PhaseBound BoundOf(const WeightsRow& row, const Outcome& none) const;

  std::string preset_name_;
  DevicePreset preset_;  // scaled
  int64_t batch_ = 0;
  bool training_ = false;
};

absl::StatusOr<WeightsCase> WeightsCase::Create(const std::string& preset, int64_t batch,
                                                bool training) {
  WeightsCase of;
  of.preset_name_ = preset;
  PINION_ASSIGN_OR_RETURN(const DevicePreset base, FindPreset(preset));
  // FLOPs per byte of weights, in proportion to the batch.
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
    const auto computed_ms = [&] { return machine.time_stats(kTrainedDevice).compute_busy_ms; };
    double phase_ms = 0, step_ms = 0, compute_ms = 0;
    const auto step = [&] {
      const double begin_ms = machine.now_ms();
      const double computed_before_ms = computed_ms();
      at::Tensor result = trainee->Forward(x);
      if (way.kind == Kind::kNone) {
        outcome.others_bytes =
            machine.memory_stats(kTrainedDevice).in_use_bytes - kModelLayers * LayerBytes();
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
    // Compute of forward alone.
    if (way.kind == Kind::kNone) {
      accelerator.Synchronize();
      machine.ResetTimeStats(kTrainedDevice);
      const at::NoGradGuard no_grad;
      trainee->Forward(x);
      accelerator.Synchronize();
      outcome.compute.forward_us = computed_ms() * 1e3;
    }
    // Training does not synchronize: prefetches that the optimizer's step started remain in flight.
    if (!training_) accelerator.Synchronize();
    machine.ResetPeakMemory(kTrainedDevice);
    machine.ResetTimeStats(kTrainedDevice);
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
    const TimeStats times = machine.time_stats(kTrainedDevice);
    cost.fetched_bytes = times.h2d_bytes / steps;
    cost.gradient_bytes = times.d2h_bytes / steps;
    cost.peak_bytes = machine.memory_stats(kTrainedDevice).peak_bytes;
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
    ways.push_back({Kind::kStreamed, window_layers});
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
    if (!way.streams()) continue;
    WeightsRow& row = rows.back();
    row.bound = BoundOf(row, none);
    row.is_hidden = row.bound.overlapped_us <= kHidden * none.cost.compute_us;
  }
  return rows;
}

PhaseBound WeightsCase::BoundOf(const WeightsRow& row, const Outcome& none) const {
  if (row.way.kind == Kind::kShared) {
    return SharedBound(preset_.link, none.others_bytes, row.target_bytes, none.compute);
  }
  int window_layers = row.way.window_layers;
  if (row.way.kind == Kind::kTarget) {
    // Other memory peaks at the end of forward in training, at any time in inference.
    const uint64_t others_bytes =
        training_ ? none.others_bytes : none.cost.peak_bytes - kModelLayers * LayerBytes();
    const uint64_t left_bytes = row.target_bytes - std::min(row.target_bytes, others_bytes);
    window_layers = std::min(kModelLayers, static_cast<int>(left_bytes / LayerBytes()));
  }
  return training_ ? TrainingBound(preset_.link, window_layers, none.compute)
                   : InferenceBound(preset_.link, window_layers, none.cost.compute_us);
}

}  // namespace

std::string WeightsWay::name() const {
  if (kind == Kind::kNone) return "no offload";
  if (kind == Kind::kBlocking) return "blocking";
  if (kind == Kind::kStreamed) return absl::StrCat("streamed, ", window_layers, " layers");
  return absl::StrCat("target ", target_percent, " %", kind == Kind::kShared ? ", shared" : "");
}

absl::StatusOr<std::vector<WeightsRow>> RunWeights(const std::string& preset, int64_t batch,
                                                   bool training) {
  PINION_ASSIGN_OR_RETURN(const WeightsCase of, WeightsCase::Create(preset, batch, training));
  return of.RunAll();
}

}  // namespace pinion
