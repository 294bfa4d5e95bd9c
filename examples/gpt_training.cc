#include "pinion/examples/gpt_training.h"

#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/allocation_label.h"
#include "pinion/device/host_arithmetic.h"
#include "pinion/examples/checkpoint.h"
#include "pinion/hooks/plan/step_recorder.h"
#include "pinion/programs/gpt_config.h"
#include "pinion/programs/output_file.h"

namespace pinion {
namespace {

constexpr double kLearningRate = 1e-3;
constexpr int64_t kLearningRateWarmup = 20;
constexpr double kBeta1 = 0.9, kBeta2 = 0.99, kWeightDecay = 0.1, kEpsilon = 1e-8;

}  // namespace

FusedAdamW::FusedAdamW(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
  const AllocationLabel label("optimizer state");
  for (const at::Tensor& parameter : parameters_) {
    means_.push_back(at::zeros_like(parameter));
    squares_.push_back(at::zeros_like(parameter));
  }
}

void FusedAdamW::Step(const std::vector<at::Tensor>& gradients, int64_t step) {
  const c10::NoGradGuard no_grad;
  const AllocationLabel label("optimizer state");
  const double warmup = std::min(1.0, static_cast<double>(step) / kLearningRateWarmup);
  const std::vector<at::Tensor> steps(
      parameters_.size(),
      at::scalar_tensor(static_cast<float>(step), parameters_[0].options().dtype(at::kFloat)));
  at::_fused_adamw_(parameters_, gradients, means_, squares_, /*max_exp_avg_sqs=*/{}, steps,
                    warmup * kLearningRate, kBeta1, kBeta2, kWeightDecay, kEpsilon,
                    /*amsgrad=*/false, /*maximize=*/false);
}

GptTraining::GptTraining(const RunOptions& options, const TextData& text, Accelerator& accelerator,
                         std::shared_ptr<OffloadSession> session, int64_t& steps_done)
    : options_(options),
      text_(text),
      accelerator_(accelerator),
      trace_(accelerator.trace()),
      session_(std::move(session)),
      steps_done_(steps_done) {}

absl::Status GptTraining::Build(const HostTierOptions& tier) {
  torch::manual_seed(options_.seed);
  model_ = Gpt(options_.model);
  const at::ScalarType type = options_.model.bfloat16 ? at::kBFloat16 : at::kFloat;
  if (options_.offload_weights) {
    model_->to(type);
    PINION_ASSIGN_OR_RETURN(
        weights_,
        WeightOffloader::Attach(
            *model_, accelerator_.device(), accelerator_.backend(),
            {.tier = tier, .memory_target_bytes = options_.memory_target_bytes.value_or(0)}));
    parameters_ = weights_->host_parameters();
  } else {
    {
      const AllocationLabel label("parameters");
      model_->to(accelerator_.device(), type);
    }
    parameters_ = model_->parameters();
    MakeGradients();
  }
  optimizer_.emplace(parameters_);
  return options_.resume_path.empty() ? absl::OkStatus() : Resume();
}

float GptTraining::Step() {
  const int64_t step = steps_done_ + 1;
  const ScopedRange range(trace_.get(), "step");
  // Seeds dropout by the step, so that a resumed run draws the same numbers.
  torch::manual_seed(options_.seed + 1'000'003 * step);
  const Batch batch = UploadBatch(step);
  if (weights_ == nullptr) all_gradients_.zero_();
  at::Tensor loss;
  {
    const ScopedRange forward(trace_.get(), "forward");
    std::optional<OffloadScope> scope;
    if (session_ != nullptr) scope.emplace(session_, *model_);
    loss = Loss(batch);
  }
  {
    const ScopedRange backward(trace_.get(), "backward");
    loss.backward();
  }
  {
    const ScopedRange optimizer(trace_.get(), "optimizer");
    weights_ == nullptr ? optimizer_->Step(gradients_, step) : StepOnHost(step);
  }
  steps_done_ = step;
  return loss.item<float>();
}

void GptTraining::StepOnHost(int64_t step) {
  weights_->Step([&] {
    gradients_.clear();
    for (const at::Tensor& master : parameters_) gradients_.push_back(master.grad());
    optimizer_->Step(gradients_, step);
    // Reads gradients; reads and writes weights, means and squares.
    uint64_t memory_bytes = 0;
    for (const at::Tensor& master : parameters_) memory_bytes += 3 * master.nbytes();
    for (const at::Tensor& mean : optimizer_->means()) memory_bytes += 4 * mean.nbytes();
    CountHostArithmetic(memory_bytes);
  });
  if (options_.for_comparison) {
    std::vector<at::Tensor> flat;
    for (const at::Tensor& gradient : gradients_) flat.push_back(gradient.flatten());
    // Added to 0, like gradients of a run without offload: -0 becomes 0.
    all_gradients_ = at::cat(flat).add_(0);
  }
  weights_->ZeroGrad();
}

// Kept across steps, so that the rest of the peak is activations. Views of one tensor, so that one
// operator clears all.
void GptTraining::MakeGradients() {
  const AllocationLabel label("gradients");
  int64_t count = 0;
  for (const at::Tensor& parameter : parameters_) count += parameter.numel();
  all_gradients_ = at::zeros({count}, parameters_[0].options().requires_grad(false));
  int64_t offset = 0;
  for (at::Tensor& parameter : parameters_) {
    parameter.mutable_grad() =
        all_gradients_.narrow(0, offset, parameter.numel()).view(parameter.sizes());
    gradients_.push_back(parameter.grad());
    offset += parameter.numel();
  }
}

GptTraining::Batch GptTraining::UploadBatch(int64_t step) const {
  const GptConfig& model = options_.model;
  TokenBatch tokens = text_.Sample(model.batch, model.sequence, options_.seed, step);
  const auto upload = [&](std::vector<int64_t>& row_by_row) {
    return at::from_blob(row_by_row.data(), {model.batch, model.sequence},
                         at::TensorOptions().dtype(at::kLong))
        .to(accelerator_.device());
  };
  return {upload(tokens.inputs), upload(tokens.targets)};
}

at::Tensor GptTraining::Loss(const Batch& batch) {
  const at::Tensor logits = model_->forward(batch.inputs).to(at::kFloat);
  return at::cross_entropy_loss(logits.flatten(0, 1), batch.targets.flatten());
}

absl::StatusOr<StepTrace> GptTraining::RecordStep() {
  PINION_ASSIGN_OR_RETURN(const std::shared_ptr<StepRecorder> recorder,
                          StepRecorder::Create(accelerator_.backend()));
  const Batch batch = UploadBatch(steps_done_ + 1);
  at::Tensor loss;
  {
    const RecordScope record(recorder);
    loss = Loss(batch);
  }
  loss.backward();
  using Steps = std::map<int, StepTrace>;
  PINION_ASSIGN_OR_RETURN(Steps steps, recorder->Finish());
  return std::move(steps[accelerator_.device().index()]);
}

// Returns the options that a checkpoint's run and this run must share.
std::string GptTraining::Description() const {
  const GptConfig& model = options_.model;
  return absl::StrCat(
      "--layers=", model.layers, " --width=", model.width, " --heads=", model.heads,
      " --sequence=", model.sequence, " --batch=", model.batch, " --dropout=", model.dropout,
      " --dtype=", model.bfloat16 ? "bfloat16" : "float32", " --seed=", options_.seed,
      " on a text of ", text_.size(), " bytes, ", text_.vocabulary(), " of them different");
}

// Returns every tensor of the run's state by its name in a checkpoint.
std::map<std::string, at::Tensor> GptTraining::State() const {
  std::map<std::string, at::Tensor> state;
  size_t i = 0;
  for (const auto& parameter : model_->named_parameters()) {
    state.emplace(absl::StrCat("model.", parameter.key()), parameters_[i]);
    state.emplace(absl::StrCat("mean.", parameter.key()), optimizer_->means()[i]);
    state.emplace(absl::StrCat("square.", parameter.key()), optimizer_->squares()[i]);
    ++i;
  }
  return state;
}

absl::Status GptTraining::Resume() {
  PINION_ASSIGN_OR_RETURN(const Checkpoint checkpoint, ReadCheckpoint(options_.resume_path));
  if (checkpoint.run != Description()) {
    return absl::InvalidArgumentError(absl::StrCat(options_.resume_path, " was trained with ",
                                                   checkpoint.run, ", not with ", Description()));
  }
  std::map<std::string, at::Tensor> state = State();
  for (auto& [name, tensor] : state) {
    const auto saved = checkpoint.tensors.find(name);
    if (saved == checkpoint.tensors.end() || saved->second.sizes() != tensor.sizes()) {
      return absl::DataLossError(
          absl::StrCat(options_.resume_path, " has no tensor ", name, " of the right size"));
    }
  }
  const auto copy = [&] {
    const c10::NoGradGuard no_grad;
    for (auto& [name, tensor] : state) tensor.copy_(checkpoint.tensors.at(name));
  };
  weights_ == nullptr ? copy() : weights_->Step(copy);
  steps_done_ = checkpoint.steps;
  return absl::OkStatus();
}

absl::Status GptTraining::WriteFiles() const {
  if (!options_.checkpoint_path.empty()) {
    Checkpoint checkpoint;
    checkpoint.steps = steps_done_;
    checkpoint.run = Description();
    for (const auto& [name, tensor] : State()) {
      checkpoint.tensors.emplace(name, tensor.detach().cpu());
    }
    PINION_RETURN_IF_ERROR(WriteCheckpoint(options_.checkpoint_path, checkpoint));
  }
  if (options_.trace_path.empty()) return absl::OkStatus();
  return WriteAtomically(options_.trace_path, [this](const std::string& temporary) {
    return accelerator_.WriteTrace(temporary);
  });
}

uint64_t GptTraining::StateBytes() const {
  uint64_t bytes = 0;
  for (const auto& [name, tensor] : State()) bytes += tensor.nbytes();
  return bytes;
}

}  // namespace pinion
