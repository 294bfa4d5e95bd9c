#include "pinion/examples/training_run.h"

#include <ATen/Context.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <map>
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
#include "pinion/device/allocation_label.h"
#include "pinion/device/trace/trace_sink.h"
#include "pinion/engine/plan/explain_plan.h"
#include "pinion/engine/plan/step_record.h"
#include "pinion/engine/tier/host_tier.h"
#include "pinion/examples/checkpoint.h"
#include "pinion/examples/fused_adamw.h"
#include "pinion/examples/tensor_fingerprint.h"
#include "pinion/examples/text_data.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/environment.h"
#include "pinion/hooks/plan/step_recorder.h"
#include "pinion/hooks/weights/weight_offloader.h"
#include "pinion/programs/accelerator.h"
#include "pinion/programs/gpt.h"
#include "pinion/programs/gpt_config.h"
#include "pinion/programs/output_file.h"
#include "pinion/programs/run_options.h"

namespace pinion {
namespace {

struct Batch {
  at::Tensor inputs, targets;  // [batch, sequence], on the device
};

// A run's counters at one moment.
struct Reading {
  double now_ms = 0;
  double wall_s = 0;
  std::optional<double> compute_ms;
  std::optional<double> stalled_ms;
  uint64_t moved_bytes = 0;
};

class Trainer {
 public:
  // Counts the steps that are done in `steps_done`, those of a resumed run included.
  Trainer(const RunOptions& options, const TextData& text, Accelerator accelerator,
          const HostTierOptions& tier, std::shared_ptr<OffloadSession> session, int64_t& steps_done)
      : options_(options),
        text_(text),
        accelerator_(std::move(accelerator)),
        trace_(accelerator_.trace()),
        tier_(tier),
        session_(std::move(session)),
        steps_done_(steps_done) {}

  absl::Status Build() {
    torch::manual_seed(options_.seed);
    model_ = Gpt(options_.model);
    const at::ScalarType type = options_.model.bfloat16 ? at::kBFloat16 : at::kFloat;
    if (options_.offload_weights) {
      model_->to(type);
      PINION_ASSIGN_OR_RETURN(
          weights_,
          WeightOffloader::Attach(
              *model_, accelerator_.device(), accelerator_.backend(),
              {.tier = tier_, .memory_target_bytes = options_.memory_target_bytes.value_or(0)}));
      parameters_ = weights_->host_parameters();
    } else {
      const AllocationLabel label("parameters");
      model_->to(accelerator_.device(), type);
    }
    if (weights_ == nullptr) {
      parameters_ = model_->parameters();
      MakeGradients();
    }
    optimizer_.emplace(parameters_);
    return options_.resume_path.empty() ? absl::OkStatus() : Resume();
  }

  absl::StatusOr<RunResult> Run(const ProgressSink& progress) {
    const int64_t warmup = options_.steps > kWarmupSteps ? kWarmupSteps : 0;
    const int64_t last_step = steps_done_ + options_.steps;
    OffloadStats stats_after_warmup;
    uint64_t pins_after_warmup = 0;
    Reading total;
    for (int64_t i = 0; i < options_.steps; ++i) {
      if (i == warmup && session_ != nullptr) {
        stats_after_warmup = session_->GetStats();
        pins_after_warmup = session_->GetAllocatorStats().pin_calls;
      }
      accelerator_.Synchronize();
      // The first step pins host memory and measures the link, which would fill the picture.
      if (i == 1) accelerator_.RestartTrace();
      const Reading before = Read();
      const float loss = Step();
      accelerator_.Synchronize();
      const Reading after = Read();
      result_.losses.push_back(loss);
      if (i >= warmup) {
        total.now_ms += after.now_ms - before.now_ms;
        total.wall_s += after.wall_s - before.wall_s;
        total.moved_bytes += after.moved_bytes - before.moved_bytes;
        if (after.stalled_ms) {
          total.stalled_ms = total.stalled_ms.value_or(0) + *after.stalled_ms - *before.stalled_ms;
          total.compute_ms = total.compute_ms.value_or(0) + *after.compute_ms - *before.compute_ms;
        }
      }
      if (options_.for_comparison) {
        result_.gradient_fingerprints.push_back(TensorFingerprint(all_gradients_));
      }
      if (progress) progress(Progress(before, after, loss, last_step));
    }

    const double measured = options_.steps - warmup;
    result_.step_ms = total.now_ms / measured;
    if (total.stalled_ms) {
      result_.stall_ms = *total.stalled_ms / measured;
      result_.compute_ms = *total.compute_ms / measured;
    }
    result_.bytes_moved = total.moved_bytes / measured;
    result_.tokens_per_s = options_.model.tokens() * measured / total.wall_s;
    result_.peak_device_bytes = accelerator_.peak_bytes();
    if (weights_ == nullptr) {
      result_.persistent_bytes = all_gradients_.nbytes();
      for (const auto& [name, tensor] : State()) result_.persistent_bytes += tensor.nbytes();
      result_.peak_activation_bytes =
          result_.peak_device_bytes - std::min(result_.peak_device_bytes, result_.persistent_bytes);
    } else {
      result_.two_layers_bytes = 2 * weights_->GetStats().two_largest_bytes;
    }
    if (session_ != nullptr) {
      const OffloadStats stats = session_->GetStats();
      const AllocatorStats allocator = session_->GetAllocatorStats();
      const uint64_t packed = stats.packed - stats_after_warmup.packed;
      result_.pin_calls_after_warmup = allocator.pin_calls - pins_after_warmup;
      result_.pack_unpack_us =
          packed == 0 ? 0 : (stats.pack_unpack_us - stats_after_warmup.pack_unpack_us) / packed;
      result_.offloaded_bytes =
          (stats.offloaded_bytes - stats_after_warmup.offloaded_bytes) / measured;
      result_.offloaded_tensors = (stats.offloaded - stats_after_warmup.offloaded) / measured;
      result_.pinned_host_bytes = allocator.locked_bytes.peak;
      const int device = accelerator_.device().index();
      result_.plan = session_->Explain(device);
      result_.plan_svg = session_->Explain(device, PlanFormat::kSvg);
      result_.plan_trace = session_->Explain(device, PlanFormat::kChromeTrace);
    }
    PINION_RETURN_IF_ERROR(WriteFiles());
    if (options_.for_comparison && session_ == nullptr && weights_ == nullptr &&
        !options_.model.checkpoint_blocks && accelerator_.machine() != nullptr) {
      PINION_ASSIGN_OR_RETURN(result_.step, RecordStep());
    }
    return std::move(result_);
  }

 private:
  float Step() {
    const int64_t step = steps_done_ + 1;
    const ScopedRange range(trace_.get(), "step");
    // Of dropout: a function of the step, so that a resumed run draws what the other would have.
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

  void StepOnHost(int64_t step) {
    uint64_t state_bytes = 0;
    for (const at::Tensor& mean : optimizer_->means()) state_bytes += 2 * mean.nbytes();
    weights_->Step(
        [&] {
          gradients_.clear();
          for (const at::Tensor& master : parameters_) gradients_.push_back(master.grad());
          optimizer_->Step(gradients_, step);
        },
        state_bytes);
    if (options_.for_comparison) {
      std::vector<at::Tensor> flat;
      for (const at::Tensor& gradient : gradients_) flat.push_back(gradient.flatten());
      // Added to zeros, as those of a run without offload: -0 becomes 0.
      all_gradients_ = at::cat(flat).add_(0);
    }
    weights_->ZeroGrad();
  }

  // Kept from step to step, so that what is left of the peak is activations, and views of one
  // tensor, so that one operator clears them.
  void MakeGradients() {
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

  Batch UploadBatch(int64_t step) const {
    const GptConfig& model = options_.model;
    TokenBatch tokens = text_.Sample(model.batch, model.sequence, options_.seed, step);
    const auto upload = [&](std::vector<int64_t>& row_by_row) {
      return at::from_blob(row_by_row.data(), {model.batch, model.sequence},
                           at::TensorOptions().dtype(at::kLong))
          .to(accelerator_.device());
    };
    return {upload(tokens.inputs), upload(tokens.targets)};
  }

  at::Tensor Loss(const Batch& batch) {
    const at::Tensor logits = model_->forward(batch.inputs).to(at::kFloat);
    return at::cross_entropy_loss(logits.flatten(0, 1), batch.targets.flatten());
  }

  // What one more step saves and reads. Spoils the gradients.
  absl::StatusOr<StepRecord> RecordStep() {
    PINION_ASSIGN_OR_RETURN(const std::shared_ptr<StepRecorder> recorder,
                            StepRecorder::Create(accelerator_.backend()));
    const Batch batch = UploadBatch(steps_done_ + 1);
    at::Tensor loss;
    {
      const RecordScope record(recorder);
      loss = Loss(batch);
    }
    loss.backward();
    using Steps = std::map<int, StepRecord>;
    PINION_ASSIGN_OR_RETURN(Steps steps, recorder->Finish());
    return std::move(steps[accelerator_.device().index()]);
  }

  Reading Read() const {
    Reading reading;
    reading.now_ms = accelerator_.now_ms();
    reading.wall_s =
        std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    reading.compute_ms = accelerator_.compute_ms();
    reading.stalled_ms = accelerator_.stalled_ms();
    if (session_ != nullptr) {
      const EngineStats engine = session_->GetEngineStats(accelerator_.device().index());
      reading.moved_bytes = engine.h2d.submitted_bytes + engine.d2h.submitted_bytes;
    } else if (weights_ != nullptr) {  // beside a session, its engine has moved them
      const WeightStats weights = weights_->GetStats();
      reading.moved_bytes = weights.fetched_bytes + weights.gradient_bytes;
    }
    return reading;
  }

  StepProgress Progress(const Reading& before, const Reading& after, double loss,
                        int64_t last_step) const {
    StepProgress progress;
    progress.step = steps_done_;
    progress.last_step = last_step;
    progress.loss = loss;
    progress.tokens_per_s = options_.model.tokens() / (after.wall_s - before.wall_s);
    progress.peak_device_bytes = accelerator_.peak_bytes();
    if (session_ != nullptr) {
      progress.pinned_host_bytes = session_->GetAllocatorStats().locked_bytes.current;
    }
    progress.link_gb_per_s =
        (after.moved_bytes - before.moved_bytes) / ((after.now_ms - before.now_ms) * 1e6);
    return progress;
  }

  // What a checkpoint's run and this one must have in common.
  std::string Description() const {
    const GptConfig& model = options_.model;
    return absl::StrCat(
        "--layers=", model.layers, " --width=", model.width, " --heads=", model.heads,
        " --sequence=", model.sequence, " --batch=", model.batch, " --dropout=", model.dropout,
        " --dtype=", model.bfloat16 ? "bfloat16" : "float32", " --seed=", options_.seed,
        " on a text of ", text_.size(), " bytes, ", text_.vocabulary(), " of them different");
  }

  // Every tensor of the run's state by its name in a checkpoint.
  std::map<std::string, at::Tensor> State() const {
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

  absl::Status Resume() {
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

  absl::Status WriteFiles() const {
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

  const RunOptions& options_;
  const TextData& text_;
  Accelerator accelerator_;
  const std::shared_ptr<TraceSink> trace_;  // null without a trace
  const HostTierOptions tier_;
  std::shared_ptr<OffloadSession> session_;  // null without offload
  int64_t& steps_done_;                      // the caller's: it outlives what throws

  Gpt model_ = nullptr;
  std::vector<at::Tensor> parameters_, gradients_;
  at::Tensor all_gradients_;
  std::unique_ptr<WeightOffloader> weights_;  // null where the device has them
  std::optional<FusedAdamW> optimizer_;
  RunResult result_;
};

absl::Status OutOfMemory(const RunOptions& options, int64_t step, const std::string& report) {
  const std::string limit =
      options.device_memory_bytes == UINT64_MAX
          ? ""
          : absl::StrCat(" under --device_memory=", HumanBytes(options.device_memory_bytes));
  const bool offloads = options.offload != OffloadMode::kNone;
  const bool disabled = offloads && SwitchedOnByEnvironment("PINION_DISABLE");
  return absl::ResourceExhaustedError(
      absl::StrCat(options.device, " ran out of memory in step ", step,
                   " with --offload=", OffloadModeName(options.offload), limit, "; ",
                   disabled   ? absl::StrCat("unset ", SwitchesThatAreOn())
                   : offloads ? "use a smaller --batch or more memory"
                              : "use --offload=pinion or more memory",
                   "\n", report));
}

}  // namespace

void AskForRepeatableBits() {
  // cuBLAS's workspaces of a fixed size; a user's own choice stays.
  setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  // With warn_only attention's backward would take the algorithm that does not repeat itself.
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

absl::Status CheckRun(const RunOptions& options, const TextData& text) {
  PINION_RETURN_IF_ERROR(options.model.Validate());
  PINION_RETURN_IF_ERROR(text.CheckSequence(options.model.sequence));
  if (options.steps < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--steps=", options.steps, " must be at least 1"));
  }
  if (options.offload_weights) return absl::OkStatus();
  const uint64_t persistent_bytes = PersistentBytes(options.model);
  if (options.device_memory_bytes < persistent_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("--device_memory=", HumanBytes(options.device_memory_bytes),
                     " is too small: parameters, gradients and optimizer state alone take ",
                     HumanBytes(persistent_bytes)));
  }
  return absl::OkStatus();
}

absl::StatusOr<RunResult> Train(const RunOptions& options, const TextData& text,
                                const ProgressSink& progress) {
  PINION_RETURN_IF_ERROR(CheckRun(options, text));
  int64_t steps_done = 0;
  try {
    PINION_ASSIGN_OR_RETURN(Accelerator accelerator, Accelerator::Open(options));
    HostTierOptions tier;
    tier.engine.trace = accelerator.trace();
    std::shared_ptr<OffloadSession> session;
    if (options.offload != OffloadMode::kNone) {
      OffloadOptions offload;
      offload.overlap = options.offload != OffloadMode::kBlocking;
      if (options.offload == OffloadMode::kPlanned) {
        offload.memory_target_bytes =
            options.memory_target_bytes.value_or(OffloadOptions::kAutoTarget);
      }
      offload.engine.trace = accelerator.trace();
      tier = {.allocator = offload.allocator, .engine = offload.engine};
      PINION_ASSIGN_OR_RETURN(session, OffloadSession::Create(offload, accelerator.backend()));
      // Measures the link, which takes memory of its own: none of the weights' target.
      if (options.offload_weights && options.memory_target_bytes.has_value()) {
        PINION_RETURN_IF_ERROR(session->Reserve(accelerator.device().index(), kMiB));
      }
    }
    if (options.for_comparison && accelerator.device().is_cuda()) AskForRepeatableBits();
    Trainer trainer(options, text, std::move(accelerator), tier, std::move(session), steps_done);
    PINION_RETURN_IF_ERROR(trainer.Build());
    return trainer.Run(progress);
  } catch (const c10::OutOfMemoryError& error) {
    return OutOfMemory(options, steps_done + 1, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    return absl::InternalError(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  }
}

}  // namespace pinion
