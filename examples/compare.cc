#include "pinion/examples/compare.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/plan_step.h"
#include "pinion/examples/text_data.h"
#include "pinion/examples/training_run.h"
#include "pinion/hooks/environment.h"
#include "pinion/programs/command_line.h"
#include "pinion/programs/gpt_config.h"
#include "pinion/programs/run_options.h"
#include "pinion/programs/step_bound.h"

namespace pinion {
namespace {

// One link hides the transfers of small models, whose FLOPs per byte are few; the other cannot. The
// printed lower bound tells whether they do.
constexpr const char* kRealPresets[] = {"gh200_c2c", "a100_pcie4"};

// "The link can hide the copies" (docs/results/benchmarks.md).
constexpr double kHiddenBound = 1.01;

// As a share of the step.
constexpr double kStallThatCounts = 0.01;

// Below this share of compute in a step, something else bounds it.
constexpr double kComputeBound = 0.9;

// Compares bits: a NaN loss equals itself.
bool SameBits(const RunResult& a, const RunResult& b) {
  return a.gradient_fingerprints == b.gradient_fingerprints &&
         std::equal(a.losses.begin(), a.losses.end(), b.losses.begin(), b.losses.end(),
                    [](float x, float y) {
                      return std::bit_cast<uint32_t>(x) == std::bit_cast<uint32_t>(y);
                    });
}

// Returns whether no signal ended the run early.
bool IsComplete(const RunResult& result, const RunOptions& options) {
  return static_cast<int64_t>(result.losses.size()) == options.steps;
}

// `repetition` is the second run without offload; computed here if it is empty.
absl::StatusOr<ComparedGroup> CompareOn(const std::string& name, RunOptions options,
                                        const TextData& text, const RunAnnouncement& announce,
                                        std::optional<RunResult>& repetition) {
  ComparedGroup group;
  group.name = name;
  const bool is_first = !repetition.has_value();
  const std::string trace_path = std::exchange(options.trace_path, "");
  const bool is_emulated = absl::StartsWith(options.device, "emu:");
  const auto add = [&](ComparedRun run) -> absl::Status {
    if (StopSignal() != 0) return absl::OkStatus();
    announce(absl::StrCat(name, ", ", run.Name()));
    options.offload = run.offload;
    options.model.checkpoint_blocks = run.checkpoint_blocks;
    options.offload_weights = run.offload_weights;
    const bool is_plain = !run.checkpoint_blocks && !run.offload_weights;
    options.trace_path = run.offload == OffloadMode::kPinion && is_plain ? trace_path : "";
    if (run.offload != OffloadMode::kPlanned) {
      options.memory_target_bytes.reset();
    } else if (is_plain) {
      options.memory_target_bytes = group.runs.back().result.peak_device_bytes;
    }
    PINION_ASSIGN_OR_RETURN(run.result, Train(options, text, nullptr));
    if (!IsComplete(run.result, options)) return absl::OkStatus();
    if (!repetition.has_value()) {
      announce(absl::StrCat(name, ", ", run.Name(), " once more"));
      PINION_ASSIGN_OR_RETURN(RunResult again, Train(options, text, nullptr));
      if (IsComplete(again, options)) repetition = std::move(again);
    }
    if (group.runs.empty()) {
      if (repetition.has_value()) run.repeats_itself = SameBits(run.result, *repetition);
    } else if (!run.offload_weights || is_emulated) {
      run.bit_identical = BitIdentical(run.result, group.runs.front().result, *repetition);
    }
    group.runs.push_back(std::move(run));
    return absl::OkStatus();
  };
  for (const OffloadMode mode :
       {OffloadMode::kNone, OffloadMode::kBlocking, OffloadMode::kPinion, OffloadMode::kPlanned}) {
    PINION_RETURN_IF_ERROR(add({.offload = mode}));
  }
  if (StopSignal() != 0) return group;
  // The same target with checkpoints; skipped if the planned run does not stall: its plan would
  // recompute nothing.
  const RunResult& planned = group.runs.back().result;
  if (planned.stall_ms.value_or(planned.step_ms) > kStallThatCounts * planned.step_ms) {
    PINION_RETURN_IF_ERROR(add({.offload = OffloadMode::kPlanned, .checkpoint_blocks = true}));
  }
  // The first group represents all.
  if (is_first) {
    for (const OffloadMode mode : {OffloadMode::kNone, OffloadMode::kPinion}) {
      PINION_RETURN_IF_ERROR(add({.offload = mode, .checkpoint_blocks = true}));
    }
    for (const OffloadMode mode : {OffloadMode::kNone, OffloadMode::kPinion}) {
      PINION_RETURN_IF_ERROR(add({.offload = mode, .offload_weights = true}));
    }
  }
  return group;
}

// Returns the calibration that measuring the preset's link would give.
LinkCalibration LinkOf(const LinkModel& model) {
  LinkCalibration link;
  link.d2h.gb_per_s = model.d2h_gb_per_s;
  link.h2d.gb_per_s = model.h2d_gb_per_s;
  link.d2h_duplex_gb_per_s = model.d2h_duplex_gb_per_s;
  link.h2d_duplex_gb_per_s = model.h2d_duplex_gb_per_s;
  return link;
}

// Adds a group unless a signal left it without a complete run.
void AddGroup(ComparedGroup group, std::vector<ComparedGroup>& groups) {
  if (!group.runs.empty()) groups.push_back(std::move(group));
}

absl::StatusOr<std::string> LinkVerdict(const ComparedGroup& group, const RunOptions& options) {
  if (group.runs.size() <= static_cast<size_t>(OffloadMode::kPinion)) {
    return "a signal has ended the comparison";
  }
  const RunResult& none = group.runs.front().result;
  const RunResult& pinion = group.runs[static_cast<size_t>(OffloadMode::kPinion)].result;
  // Pinion's peak may be slightly below the record's least memory, where the bound is infinite. The
  // bound at the least memory also holds for the peak.
  PINION_ASSIGN_OR_RETURN(const uint64_t least_bytes, LeastMemoryBytes(none.step));
  PINION_ASSIGN_OR_RETURN(
      const double bound_us,
      StepLowerBoundUs(none.step, std::max(pinion.peak_device_bytes, least_bytes),
                       LinkOf(options.preset.link)));
  const double bound = bound_us / none.step.compute_us();
  std::string verdict = absl::StrFormat(
      "the link %s hide the transfer: within Pinion's peak no policy beats %.2f x the compute",
      bound <= kHiddenBound ? "can" : "cannot", bound);
  if (*none.compute_ms < kComputeBound * none.step_ms) {
    absl::StrAppendFormat(&verdict,
                          "; this model is too small for it: the host's calls, not compute (%.2f "
                          "ms), set the pace",
                          *none.compute_ms);
  }
  return verdict;
}

}  // namespace

std::string ComparedRun::Name() const {
  const std::string offloaded = OffloadModeName(offload);
  if (!checkpoint_blocks && !offload_weights) return offloaded;
  const std::string more = checkpoint_blocks ? "checkpoint" : "weights";
  return offload == OffloadMode::kNone ? more : absl::StrCat(more, "+", offloaded);
}

std::optional<bool> BitIdentical(const RunResult& run, const RunResult& reference,
                                 const RunResult& repetition) {
  if (!SameBits(reference, repetition)) return std::nullopt;
  return SameBits(run, reference);
}

absl::Status CheckBits(const std::vector<ComparedGroup>& groups) {
  std::vector<std::string> changed;
  for (const ComparedGroup& group : groups) {
    for (const ComparedRun& run : group.runs) {
      if (run.bit_identical.value_or(true)) continue;
      changed.push_back(absl::StrCat(group.name, " with --offload=", OffloadModeName(run.offload),
                                     run.checkpoint_blocks ? " --checkpoint_blocks" : "",
                                     run.offload_weights ? " --offload_weights" : ""));
    }
  }
  if (changed.empty()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("losses or gradients differ from those without offload: ",
                                          absl::StrJoin(changed, ", ")));
}

absl::StatusOr<std::vector<ComparedGroup>> Compare(const RunOptions& base, const TextData& text,
                                                   const RunAnnouncement& announce) {
  if (SwitchedOnByEnvironment("PINION_DISABLE")) {
    return absl::FailedPreconditionError(
        absl::StrCat("--compare has nothing to compare with ", SwitchesThatAreOn(), ": unset it"));
  }
  RunOptions options = base;
  options.for_comparison = true;
  options.device_memory_bytes = UINT64_MAX;
  std::vector<ComparedGroup> groups;
  std::optional<RunResult> repetition;
  if (!absl::StartsWith(options.device, "emu:")) {
    PINION_ASSIGN_OR_RETURN(ComparedGroup group,
                            CompareOn(options.device, options, text, announce, repetition));
    group.description = "times are measured";
    AddGroup(std::move(group), groups);
    return groups;
  }
  PINION_ASSIGN_OR_RETURN(const ScaledDevice scaled, ScaledDeviceFor(options.model));
  options.preset = scaled.preset;
  PINION_ASSIGN_OR_RETURN(ComparedGroup group,
                          CompareOn("scaled", options, text, announce, repetition));
  PINION_ASSIGN_OR_RETURN(const std::string verdict, LinkVerdict(group, options));
  group.description = absl::StrCat("stands for ", scaled.stands_for, "; ", verdict);
  AddGroup(std::move(group), groups);
  options.trace_path.clear();
  for (const char* name : kRealPresets) {
    PINION_ASSIGN_OR_RETURN(options.preset, FindPreset(name));
    PINION_ASSIGN_OR_RETURN(ComparedGroup real,
                            CompareOn(name, options, text, announce, repetition));
    PINION_ASSIGN_OR_RETURN(real.description, LinkVerdict(real, options));
    AddGroup(std::move(real), groups);
  }
  return groups;
}

}  // namespace pinion
