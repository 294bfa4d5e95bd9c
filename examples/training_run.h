// Trains a GPT on an accelerator and measures the run. The header does not include LibTorch.
//
//   PINION_ASSIGN_OR_RETURN(RunResult result, Train(options, text, print_progress));
//
// On the emulated device memory and bytes are exact and times are modelled. On CUDA times are
// wall-clock times without stalls and timelines.
//
// Thread safety: one call at a time: a run on the emulated device registers its own machine.

#ifndef PINION_EXAMPLES_TRAINING_RUN_H_
#define PINION_EXAMPLES_TRAINING_RUN_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/examples/text_data.h"
#include "pinion/programs/run_options.h"

namespace pinion {

// Steps that rates and times exclude: they pin host memory, measure the link, warm up allocators,
// and are recorded.
inline constexpr int64_t kWarmupSteps = 5;

struct StepProgress {
  int64_t step = 0;  // from 1, including resumed runs
  int64_t last_step = 0;
  double loss = 0;
  double tokens_per_s = 0;  // wall time
  uint64_t peak_device_bytes = 0;
  uint64_t pinned_host_bytes = 0;
  double link_gb_per_s = 0;  // both directions, over the step's (modelled) time
};
using ProgressSink = std::function<void(const StepProgress&)>;

struct RunResult {
  std::vector<float> losses;
  std::vector<uint64_t> gradient_fingerprints;  // per step; empty unless for_comparison
  // Of one step without offload and checkpoints; empty unless for_comparison.
  StepTrace step;

  uint64_t peak_device_bytes = 0;
  uint64_t persistent_bytes = 0;  // parameters, gradients, optimizer state
  // Peak without persistent bytes; nullopt with weights on the host ...
  std::optional<uint64_t> peak_activation_bytes;
  // ... and the two largest layers with their gradients, the most on the device at once.
  uint64_t two_layers_bytes = 0;

  int64_t measured_steps = 0;  // after warm-up
  // Means over the measured steps; over all steps if there are none.
  double step_ms = 0;
  std::optional<double> compute_ms;  // in which operators ran
  std::optional<double> stall_ms;    // in which compute only waited for a copy
  double bytes_moved = 0;            // over the link, both directions, by offloading
  double offloaded_bytes = 0;        // of saved tensors with a host copy ...
  double offloaded_tensors = 0;      // ... and their number
  double tokens_per_s = 0;           // wall time

  // Of planned runs: OffloadSession::Explain, and drawings of the step that ran last.
  std::string plan;
  std::string plan_svg;
  std::string plan_trace;

  uint64_t pin_calls_after_warmup = 0;
  // The host's wall time per saved tensor. On the emulated device it includes simulating the
  // device.
  double pack_unpack_us = 0;
  uint64_t pinned_host_bytes = 0;
  // For a planned run: steps after warm-up above --memory_target, and the largest excess.
  uint64_t steps_over_target = 0;
  uint64_t most_bytes_over_target = 0;
};

// Returns InvalidArgument with flag and remedy for options that Train would refuse.
absl::Status CheckRun(const RunOptions& options, const TextData& text);

// Ends early after a step with a signal (programs/command_line.h). Bad options and files are
// InvalidArgument, NotFound or DataLoss. Running out of device memory is ResourceExhausted: one
// line, then a report of the memory's owners.
absl::StatusOr<RunResult> Train(const RunOptions& options, const TextData& text,
                                const ProgressSink& progress);

}  // namespace pinion

#endif  // PINION_EXAMPLES_TRAINING_RUN_H_
