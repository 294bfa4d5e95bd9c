// The same training without offload, with blocking offload, with Pinion and with checkpoints, side
// by side, with all of them as a plan mixes them, and with weights that live on the host.

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
  // BitIdentical to the group's run without offload. Empty where nothing can be said (an optimizer
  // on the host has another arithmetic than one on CUDA), and for that run itself.
  std::optional<bool> bit_identical = std::nullopt;
  // Of a run without offload: whether the same run once more had its bits.
  std::optional<bool> repeats_itself = std::nullopt;

  // "pinion", "checkpoint", "checkpoint+pinion", "checkpoint+planned", "weights",
  // "weights+pinion".
  std::string Name() const;
};

// One device, with the runs in the order of OffloadMode; where the planned one waits for the link
// there is another, whose blocks are checkpoints where the plan says so. The first group has four
// more, without offload and with Pinion each: two whose blocks are all checkpoints, and two whose
// weights, gradients and optimizer are on the host.
struct ComparedGroup {
  std::string name;         // "scaled", a preset's name, or "cuda:0"
  std::string description;  // for people
  std::vector<ComparedRun> runs;
};

// Whether losses and gradients of every step have the bits of the reference. Empty where the
// reference, run twice, does not have its own: the operators' fault, which says nothing of `run`.
std::optional<bool> BitIdentical(const RunResult& run, const RunResult& reference,
                                 const RunResult& repetition);

// DataLoss names the runs whose bits offload has changed.
absl::Status CheckBits(const std::vector<ComparedGroup>& groups);

// Called before each run: "scaled, blocking".
using RunAnnouncement = std::function<void(const std::string& run)>;

// On the emulated accelerator: the scaled preset, a real one whose link hides this model's
// transfers and one whose link cannot. On CUDA: the device as it is. `base` says what to train;
// its offload mode, preset and memory limit are replaced. A trace, where one is asked for, is the
// first group's run with Pinion. The planned run's target is what the run with Pinion has taken at
// its peak. The first group's run without offload is made twice, since no
// comparison means anything where it does not repeat itself. FailedPrecondition with
// PINION_DISABLE=1, which leaves nothing to compare.
//
// Ends early when a signal has come (programs/command_line.h). Only complete runs are returned;
// there may be none.
absl::StatusOr<std::vector<ComparedGroup>> Compare(const RunOptions& base, const TextData& text,
                                                   const RunAnnouncement& announce);

}  // namespace pinion

#endif  // PINION_EXAMPLES_COMPARE_H_
