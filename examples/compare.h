// Runs the same training by several methods, side by side: without offload, with blocking offload,
// Pinion, checkpoints, a plan that mixes them, and weights on the host.

#ifndef PINION_EXAMPLES_COMPARE_H_
#define PINION_EXAMPLES_COMPARE_H_

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/examples/text_data.h"
#include "pinion/examples/training_run.h"
#include "pinion/programs/run_options.h"

namespace pinion {

struct ComparedRun {
  OffloadMode offload = OffloadMode::kNone;
  bool checkpoint_blocks = false;
  bool offload_weights = false;
  RunResult result = {};
  // BitIdentical to the group's run without offload. Nullopt for that run, and if host and device
  // arithmetic differ (an optimizer on the host, CUDA).
  std::optional<bool> bit_identical = std::nullopt;
  // For a run without offload: whether a second run had the same bits.
  std::optional<bool> repeats_itself = std::nullopt;

  // "pinion", "checkpoint", "checkpoint+pinion", "checkpoint+planned", "weights",
  // "weights+pinion".
  std::string Name() const;
};

// Runs on one device, in the order of OffloadMode. If the planned run stalls, another one may
// recompute blocks. The first group has four more runs, without offload and with Pinion: two with
// every block as a checkpoint, and two with weights, gradients and optimizer on the host.
struct ComparedGroup {
  std::string name;         // "scaled", a preset's name, or "cuda:0"
  std::string description;  // for people
  std::vector<ComparedRun> runs;
};

// Returns whether losses and gradients of all steps have the reference's bits; nullopt if the
// reference does not repeat its own bits, which is the operators' fault.
std::optional<bool> BitIdentical(const RunResult& run, const RunResult& reference,
                                 const RunResult& repetition);

// Returns DataLoss with the runs whose bits offload changed.
absl::Status CheckBits(const std::vector<ComparedGroup>& groups);

// Called before each run: "scaled, blocking".
using RunAnnouncement = std::function<void(const std::string& run)>;

// Compares on the emulated device: the scaled preset, one whose link hides this model's transfers,
// and one whose link cannot. On CUDA: the device. `base` describes the training; its offload mode,
// preset and memory limit are replaced. A requested trace is of the first group's Pinion run. The
// planned run's target is the Pinion run's peak. The first run without offload is repeated: without
// repeatable bits no comparison counts. FailedPrecondition with PINION_DISABLE=1. A signal ends the
// comparison early (programs/command_line.h). Returns complete runs only, perhaps none.
absl::StatusOr<std::vector<ComparedGroup>> Compare(const RunOptions& base, const TextData& text,
                                                   const RunAnnouncement& announce);

}  // namespace pinion

#endif  // PINION_EXAMPLES_COMPARE_H_
