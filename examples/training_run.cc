#include "pinion/examples/training_run.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
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
#include "pinion/engine/planner/explain_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/engine/tier/host_tier.h"
#include "pinion/examples/checkpoint.h"
#include "pinion/examples/gpt_training.h"
#include "pinion/examples/text_data.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/environment.h"
#include "pinion/hooks/weights/weight_offloader.h"
#include "pinion/programs/accelerator.h"
#include "pinion/programs/command_line.h"
#include "pinion/programs/gpt_config.h"
#include "pinion/programs/plan_drawing.h"
#include "pinion/programs/run_options.h"

namespace pinion {
namespace {

// The counters of a run at one moment.
struct Reading {
  double now_ms = 0;
  double wall_s = 0;
  std::optional<double> compute_ms;
  std::optional<double> stalled_ms;
  uint64_t moved_bytes = 0;
};

class MeasuredRun {
 public:
  MeasuredRun(const RunOptions& options, Accelerator& accelerator,
              std::shared_ptr<OffloadSession> session, GptTraining& training,
              const int64_t& steps_done)
      : options_(options),
        accelerator_(accelerator),
        session_(std::move(session)),
        training_(training),
        steps_done_(steps_done) {}

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
      // The first step pins host memory and measures the link, which would distort the trace.
      if (i == 1) accelerator_.RestartTrace();
      const Reading before = Read();
      const float loss = training_.Step();
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
        result_.gradient_fingerprints.push_back(TensorFingerprint(training_.all_gradients()));
      }
      if (progress) progress(Progress(before, after, loss, last_step));
      if (StopSignal() != 0) break;
    }

    const auto done = static_cast<int64_t>(result_.losses.size());
    result_.measured_steps = std::max<int64_t>(done - kWarmupSteps, 0);
    const auto measured = static_cast<double>(std::max<int64_t>(done - warmup, 1));
    result_.step_ms = total.now_ms / measured;
    if (total.stalled_ms) {
      result_.stall_ms = *total.stalled_ms / measured;
      result_.compute_ms = *total.compute_ms / measured;
    }
    result_.bytes_moved = total.moved_bytes / measured;
    result_.tokens_per_s = options_.model.tokens() * measured / total.wall_s;
    result_.peak_device_bytes = accelerator_.peak_bytes();
    if (training_.weights() == nullptr) {
      result_.persistent_bytes = training_.all_gradients().nbytes();
      result_.persistent_bytes += training_.StateBytes();
      result_.peak_activation_bytes =
          result_.peak_device_bytes - std::min(result_.peak_device_bytes, result_.persistent_bytes);
    } else {
      result_.two_layers_bytes = 2 * training_.weights()->GetStats().two_largest_bytes;
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
      if (result_.measured_steps > 0) {
        result_.steps_over_target = stats.steps_over_target - stats_after_warmup.steps_over_target;
        result_.most_bytes_over_target = stats.most_bytes_over_target;
      }
      result_.pinned_host_bytes = allocator.locked_bytes.peak;
      const int device = accelerator_.device().index();
      result_.plan = session_->Explain(device);
      if (const std::vector<PlannedStep> steps = session_->PlannedSteps(device); !steps.empty()) {
        result_.plan_svg = DrawPlan(steps.front(), PlanDrawing::kSvg);
        result_.plan_trace = DrawPlan(steps.front(), PlanDrawing::kChromeTrace);
      }
    }
    PINION_RETURN_IF_ERROR(training_.WriteFiles());
    if (options_.for_comparison && session_ == nullptr && training_.weights() == nullptr &&
        !options_.model.checkpoint_blocks && accelerator_.machine() != nullptr) {
      PINION_ASSIGN_OR_RETURN(result_.step, training_.RecordStep());
    }
    return std::move(result_);
  }

 private:
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
    } else if (training_.weights() != nullptr) {  // with a session, its engine counts them
      const WeightStats weights = training_.weights()->GetStats();
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

  const RunOptions& options_;
  Accelerator& accelerator_;
  const std::shared_ptr<OffloadSession> session_;  // null without offload
  GptTraining& training_;
  const int64_t& steps_done_;
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

absl::Status CheckRun(const RunOptions& options, const TextData& text) {
  PINION_RETURN_IF_ERROR(options.model.Validate());
  PINION_RETURN_IF_ERROR(text.CheckSequence(options.model.sequence));
  if (options.steps < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--steps=", options.steps, " must be at least 1"));
  }
  if (options.offload_weights) return absl::OkStatus();
  const uint64_t persistent_bytes = PersistentBytes(options.model);
  const struct {
    const char* flag;
    uint64_t bytes;
  } limits[] = {{"--device_memory", options.device_memory_bytes},
                {"--memory_target", options.memory_target_bytes.value_or(UINT64_MAX)}};
  for (const auto& [flag, bytes] : limits) {
    if (bytes >= persistent_bytes) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(flag, "=", HumanBytes(bytes),
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
    const HostTierOptions tier = accelerator.tier_options();
    std::shared_ptr<OffloadSession> session;
    if (options.offload != OffloadMode::kNone) {
      OffloadOptions offload;
      offload.allocator = tier.allocator;
      offload.engine = tier.engine;
      offload.overlap = options.offload != OffloadMode::kBlocking;
      if (options.offload == OffloadMode::kPlanned) {
        offload.memory_target_bytes =
            options.memory_target_bytes.value_or(OffloadOptions::kAutoTarget);
      }
      PINION_ASSIGN_OR_RETURN(session, OffloadSession::Create(offload, accelerator.backend()));
      // Measures the link now, since that takes device memory.
      PINION_RETURN_IF_ERROR(session->Reserve(accelerator.device().index(), kMiB));
      accelerator.ResetPeak();
    }
    if (options.for_comparison && accelerator.device().is_cuda()) AskForRepeatableBits();
    GptTraining training(options, text, accelerator, session, steps_done);
    PINION_RETURN_IF_ERROR(training.Build(tier));
    return MeasuredRun(options, accelerator, session, training, steps_done).Run(progress);
  } catch (const c10::OutOfMemoryError& error) {
    return OutOfMemory(options, steps_done + 1, error.what_without_backtrace());
  } catch (const c10::Error& error) {
    return absl::InternalError(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  }
}

}  // namespace pinion
