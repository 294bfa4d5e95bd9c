// Trains a GPT on a text with its activations offloaded to host memory.
//
//   train_gpt                       trains under a memory limit that needs offloading
//   train_gpt --offload=none        the same without offloading: runs out of device memory
//   train_gpt --memory_target=96MiB keeps to the target, and offloads only what it must
//   train_gpt --checkpoint_blocks   recomputes each block in backward, and offloads its inputs
//   train_gpt --checkpoint_blocks --memory_target=96MiB
//                                   recomputes the blocks that the plan selects
//   train_gpt --offload_weights     keeps weights, gradients and the optimizer on the host, and
//                                   streams each block's weights to the device
//   train_gpt --offload_weights --memory_target=24MiB
//                                   keeps to the target, weights included
//   train_gpt --compare             none, blocking, Pinion and checkpoints side by side

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/examples/compare.h"
#include "pinion/examples/report.h"
#include "pinion/examples/text_data.h"
#include "pinion/examples/training_run.h"
#include "pinion/programs/accelerator.h"
#include "pinion/programs/command_line.h"
#include "pinion/programs/gpt_config.h"
#include "pinion/programs/output_file.h"
#include "pinion/programs/run_options.h"

ABSL_FLAG(std::string, text, "",
          "file to train on; default: the King James Bible of the Debian package bible-kjv");
ABSL_FLAG(std::string, size, "",
          "shape of the model: tiny, small, medium, large or wide; default: small, with --compare "
          "wide");
ABSL_FLAG(std::optional<int64_t>, layers, std::nullopt, "layers, instead of the size's");
ABSL_FLAG(std::optional<int64_t>, width, std::nullopt, "width of a layer, instead of the size's");
ABSL_FLAG(std::optional<int64_t>, heads, std::nullopt, "attention heads, instead of the size's");
ABSL_FLAG(std::optional<int64_t>, sequence, std::nullopt, "tokens in a sequence");
ABSL_FLAG(std::optional<int64_t>, batch, std::nullopt, "sequences in a step");
ABSL_FLAG(double, dropout, 0, "share of the residual branches' outputs that a step drops");
ABSL_FLAG(std::string, dtype, "float32", "float32 or bfloat16");
ABSL_FLAG(bool, checkpoint_blocks, false,
          "keep only the inputs of the model's blocks: backward recomputes each block, with "
          "--memory_target the blocks that the plan selects");
ABSL_FLAG(bool, offload_weights, false,
          "keep weights, gradients and the optimizer in host memory: a block's weights are on the "
          "device while the block is used");
ABSL_FLAG(std::optional<int64_t>, steps, std::nullopt,
          "steps to train; default: 150, with --compare 7");
ABSL_FLAG(uint64_t, seed, 1, "of the initial weights, the batches and dropout");
ABSL_FLAG(std::string, offload, "pinion",
          "none, blocking, pinion (by windows) or planned (by --memory_target)");
ABSL_FLAG(std::string, memory_target, "",
          "all that may be allocated on the device while a step runs, as 96MiB, or auto: the least "
          "that costs no time; implies --offload=planned, whose default is auto");
ABSL_FLAG(std::string, device, "", "cuda:N or emu:0; default: cuda:0 with a driver, else emu:0");
ABSL_FLAG(
    std::string, device_memory, "",
    "limit of the emulated device, as 96MiB, or unlimited; default: what the model needs with "
    "offload, which is less than it needs without");
ABSL_FLAG(std::string, preset, "",
          "emulated device: scaled (default), a100_pcie4, h100_pcie5, b200_pcie5, gh200_c2c or "
          "gb200_c2c");
ABSL_FLAG(std::string, resume, "", "checkpoint to go on from");
ABSL_FLAG(std::string, checkpoint, "", "file to write a checkpoint to at the end");
ABSL_FLAG(std::string, json, "", "file to write the results to");
ABSL_FLAG(
    std::string, trace, "",
    "file to write the timeline of copies to, with compute on the emulated device and with the "
    "host's calls and stalls on CUDA (Chrome trace: ui.perfetto.dev opens it)");
ABSL_FLAG(
    std::string, explain, "",
    "file to write the last plan of a planned run to: what stays, what moves and why, and what "
    "waits; .txt is a table, .svg a picture, .json a timeline (ui.perfetto.dev opens it)");
ABSL_FLAG(
    bool, compare, false,
    "run without offload, with blocking offload, with Pinion, planned within the same memory, "
    "without and with checkpoints, and with each block a checkpoint, alone and with Pinion");

namespace pinion {
namespace {

constexpr char kScaled[] = "scaled";
constexpr char kUnlimited[] = "unlimited";
constexpr char kAuto[] = "auto";
constexpr int64_t kDefaultSteps = 150;
constexpr int64_t kCompareSteps = 7;

// Share of the saved bytes that fit in the default memory limit.
constexpr double kDefaultActivationShare = 0.3;

absl::StatusOr<GptConfig> ModelFromFlags() {
  std::string size = absl::GetFlag(FLAGS_size);
  if (size.empty()) size = absl::GetFlag(FLAGS_compare) ? "wide" : "small";
  PINION_ASSIGN_OR_RETURN(GptConfig model, FindGptSize(size));
  model.layers = absl::GetFlag(FLAGS_layers).value_or(model.layers);
  model.width = absl::GetFlag(FLAGS_width).value_or(model.width);
  model.heads = absl::GetFlag(FLAGS_heads).value_or(model.heads);
  model.sequence = absl::GetFlag(FLAGS_sequence).value_or(model.sequence);
  model.batch = absl::GetFlag(FLAGS_batch).value_or(model.batch);
  model.dropout = absl::GetFlag(FLAGS_dropout);
  const std::string dtype = absl::GetFlag(FLAGS_dtype);
  if (dtype != "float32" && dtype != "bfloat16") {
    return absl::InvalidArgumentError(
        absl::StrCat("--dtype=", dtype, " is neither float32 nor bfloat16"));
  }
  model.bfloat16 = dtype == "bfloat16";
  model.checkpoint_blocks = absl::GetFlag(FLAGS_checkpoint_blocks);
  PINION_RETURN_IF_ERROR(model.Validate());
  return model;
}

// Refuses flags of a single run, or of the emulated device, where they have no effect.
absl::Status RefuseMeaninglessFlags(bool compare, bool emulated) {
  const struct {
    const char* name;
    bool given;
    bool single_run_only;
    bool emulated_only;
    const char* remedy;
  } flags[] = {
      {"--resume", !absl::GetFlag(FLAGS_resume).empty(), true, false, ""},
      {"--memory_target", !absl::GetFlag(FLAGS_memory_target).empty(), true, false, ""},
      {"--checkpoint_blocks", absl::GetFlag(FLAGS_checkpoint_blocks), true, false, ""},
      {"--offload_weights", absl::GetFlag(FLAGS_offload_weights), true, false, ""},
      {"--checkpoint", !absl::GetFlag(FLAGS_checkpoint).empty(), true, false, ""},
      {"--explain", !absl::GetFlag(FLAGS_explain).empty(), true, false, ""},
      {"--preset", !absl::GetFlag(FLAGS_preset).empty(), true, true, ""},
      {"--device_memory", !absl::GetFlag(FLAGS_device_memory).empty(), true, true,
       "; PYTORCH_CUDA_ALLOC_CONF=per_process_memory_fraction:F limits a CUDA device"},
  };
  for (const auto& flag : flags) {
    if (!flag.given) continue;
    if (compare && flag.single_run_only) {
      return absl::InvalidArgumentError(
          absl::StrCat(flag.name, " does not go with --compare, which chooses it itself"));
    }
    if (!emulated && flag.emulated_only) {
      return absl::InvalidArgumentError(
          absl::StrCat(flag.name, " is for the emulated device only", flag.remedy));
    }
  }
  return absl::OkStatus();
}

// Chooses the emulated device and returns its description.
absl::StatusOr<std::string> ChoosePreset(RunOptions& options) {
  const std::string name = absl::GetFlag(FLAGS_preset);
  if (!name.empty() && name != kScaled) {
    absl::StatusOr<DevicePreset> preset = FindPreset(name);
    if (!preset.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--preset=", name, " is neither ", kScaled,
                       " nor one of: ", absl::StrJoin(PresetNames(), ", ")));
    }
    options.preset = *std::move(preset);
    return options.preset.description;
  }
  PINION_ASSIGN_OR_RETURN(ScaledDevice scaled, ScaledDeviceFor(options.model));
  options.preset = scaled.preset;
  return absl::StrCat("scaled so that this model stands for ", scaled.stands_for);
}

absl::Status ChooseMemoryLimit(RunOptions& options) {
  const std::string text = absl::GetFlag(FLAGS_device_memory);
  if (text == kUnlimited) return absl::OkStatus();
  if (!text.empty()) {
    PINION_ASSIGN_OR_RETURN(options.device_memory_bytes,
                            ParseBytes("--device_memory", text, kUnlimited));
    return absl::OkStatus();
  }
  const double activation_bytes = kDefaultActivationShare * SavedBytes(options.model);
  // Streamed weights: two blocks and their gradients.
  const uint64_t persistent_bytes = options.offload_weights
                                        ? PersistentBytes(options.model) / options.model.layers
                                        : PersistentBytes(options.model);
  options.device_memory_bytes =
      AlignUp(persistent_bytes + static_cast<uint64_t>(activation_bytes), kMiB);
  return absl::OkStatus();
}

// Chooses whether the run is planned, and its target.
absl::Status ChooseTarget(RunOptions& options) {
  PINION_ASSIGN_OR_RETURN(options.offload, FindOffloadMode(absl::GetFlag(FLAGS_offload)));
  const std::string text = absl::GetFlag(FLAGS_memory_target);
  if (text.empty()) return absl::OkStatus();
  if (options.offload != OffloadMode::kPinion && options.offload != OffloadMode::kPlanned) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--memory_target does not go with --offload=", OffloadModeName(options.offload),
        ": leave --offload out"));
  }
  options.offload = OffloadMode::kPlanned;
  if (text == kAuto) return absl::OkStatus();
  PINION_ASSIGN_OR_RETURN(options.memory_target_bytes, ParseBytes("--memory_target", text, kAuto));
  return absl::OkStatus();
}

// Prints the peak of a streamed-weights run beside its bound. The bound's activations come from
// some steps with all weights on the device, if they fit.
void PrintBound(RunOptions options, const RunResult& streamed, const TextData& text) {
  if (options.memory_target_bytes.has_value()) {
    absl::PrintF("bound    device peak %s, bound %s (--memory_target)\n",
                 HumanBytes(streamed.peak_device_bytes), HumanBytes(*options.memory_target_bytes));
    return;
  }
  options.offload_weights = false;
  options.device_memory_bytes = UINT64_MAX;
  options.steps = std::min(options.steps, kWarmupSteps);
  options.resume_path.clear();
  options.checkpoint_path.clear();
  options.trace_path.clear();
  absl::PrintF("running  %d steps with all weights on the device\n", options.steps);
  std::fflush(stdout);
  const absl::StatusOr<RunResult> resident = Train(options, text, nullptr);
  absl::PrintF("bound    %s\n",
               resident.ok() ? PeakAndBound(streamed, *resident)
                             : absl::StrCat("not known, as there is no room for all weights: ",
                                            resident.status().message()));
}

// What is to be written to --explain=PATH.
absl::StatusOr<const std::string*> ExplainedIn(const RunResult& result, const std::string& path) {
  if (absl::EndsWith(path, ".txt")) return &result.plan;
  if (absl::EndsWith(path, ".svg")) return &result.plan_svg;
  if (absl::EndsWith(path, ".json")) return &result.plan_trace;
  return absl::InvalidArgumentError(
      absl::StrCat("--explain=", path, " ends in none of .txt, .svg and .json"));
}

absl::Status CheckExplain(const RunOptions& options) {
  const std::string path = absl::GetFlag(FLAGS_explain);
  if (path.empty()) return absl::OkStatus();
  if (options.offload != OffloadMode::kPlanned) {
    return absl::InvalidArgumentError(
        "--explain has no plan to write: add --memory_target or --offload=planned");
  }
  return ExplainedIn(RunResult(), path).status();
}

absl::Status CheckOutputs() {
  for (const std::string& path : {absl::GetFlag(FLAGS_json), absl::GetFlag(FLAGS_trace),
                                  absl::GetFlag(FLAGS_checkpoint), absl::GetFlag(FLAGS_explain)}) {
    if (!path.empty()) PINION_RETURN_IF_ERROR(CheckWritable(path));
  }
  return absl::OkStatus();
}

absl::Status WriteJson(const std::vector<ComparedGroup>& groups) {
  const std::string path = absl::GetFlag(FLAGS_json);
  return path.empty() ? absl::OkStatus() : WriteAtomically(path, ToJson(groups));
}

absl::Status RunComparison(const RunOptions& options, const TextData& text, bool modelled) {
  StopBySignal();
  PINION_ASSIGN_OR_RETURN(const std::vector<ComparedGroup> groups,
                          Compare(options, text, [](const std::string& run) {
                            absl::PrintF("running  %s\n", run);
                            std::fflush(stdout);
                          }));
  if (!groups.empty()) absl::PrintF("\n%s", ComparisonTable(groups, modelled));
  PINION_RETURN_IF_ERROR(WriteJson(groups));
  if (StopSignal() != 0) absl::PrintF("stopped  by a signal; only complete runs are compared\n");
  return CheckBits(groups);
}

absl::Status RunOnce(const RunOptions& options, const TextData& text, bool modelled) {
  StopBySignal();
  RunResult result;
  {
    ProgressPrinter printer(stdout, modelled);
    PINION_ASSIGN_OR_RETURN(result, Train(options, text, [&](const StepProgress& progress) {
                              printer.Print(progress);
                            }));
  }
  absl::PrintF("%s", SummaryText(options, result, modelled));
  if (const std::string path = absl::GetFlag(FLAGS_explain); !path.empty()) {
    PINION_ASSIGN_OR_RETURN(const std::string* const explained, ExplainedIn(result, path));
    PINION_RETURN_IF_ERROR(WriteAtomically(path, *explained));
  }
  ComparedGroup group;
  group.name = modelled ? absl::GetFlag(FLAGS_preset) : options.device;
  if (group.name.empty()) group.name = kScaled;
  group.runs.push_back({options.offload, options.model.checkpoint_blocks, options.offload_weights,
                        result, std::nullopt, std::nullopt});
  PINION_RETURN_IF_ERROR(WriteJson({std::move(group)}));
  if (StopSignal() != 0) {
    absl::PrintF("stopped  by a signal, after step %d of %d\n", result.losses.size(),
                 options.steps);
    return absl::OkStatus();
  }
  // Last: it trains once more.
  if (options.offload_weights) PrintBound(options, result, text);
  if (result.steps_over_target == 0) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "--memory_target=", absl::GetFlag(FLAGS_memory_target), " was not kept: ",
      result.steps_over_target, " of ", result.measured_steps, " steps had more on the device, ",
      HumanBytes(result.most_bytes_over_target), " at the most"));
}

absl::Status TrainGpt(const std::vector<char*>& arguments) {
  if (arguments.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", arguments[1], "\" is not a flag; see --help"));
  }
  const bool compare = absl::GetFlag(FLAGS_compare);
  RunOptions options;
  PINION_ASSIGN_OR_RETURN(options.model, ModelFromFlags());
  PINION_RETURN_IF_ERROR(ChooseTarget(options));
  options.steps = absl::GetFlag(FLAGS_steps).value_or(compare ? kCompareSteps : kDefaultSteps);
  options.seed = absl::GetFlag(FLAGS_seed);
  options.offload_weights = absl::GetFlag(FLAGS_offload_weights);
  options.resume_path = absl::GetFlag(FLAGS_resume);
  options.checkpoint_path = absl::GetFlag(FLAGS_checkpoint);
  options.trace_path = absl::GetFlag(FLAGS_trace);
  PINION_ASSIGN_OR_RETURN(options.device, ChooseDevice(absl::GetFlag(FLAGS_device)));
  const bool emulated = absl::StartsWith(options.device, "emu:");
  if (compare && options.steps <= kWarmupSteps) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--steps=", options.steps, " leaves --compare nothing to measure: its numbers are those ",
        "after ", kWarmupSteps, " steps of warm-up"));
  }
  PINION_RETURN_IF_ERROR(RefuseMeaninglessFlags(compare, emulated));
  PINION_RETURN_IF_ERROR(CheckExplain(options));
  PINION_RETURN_IF_ERROR(CheckOutputs());

  const std::string text_path = absl::GetFlag(FLAGS_text);
  PINION_ASSIGN_OR_RETURN(std::string contents,
                          text_path.empty() ? ReadDefaultText() : ReadTextFile(text_path));
  PINION_ASSIGN_OR_RETURN(const TextData text, TextData::Create(std::move(contents)));
  options.model.vocabulary = text.vocabulary();

  std::string device;
  if (compare) {
    if (emulated) device = "three presets, unlimited memory";
  } else if (emulated) {
    PINION_ASSIGN_OR_RETURN(device, ChoosePreset(options));
    PINION_RETURN_IF_ERROR(ChooseMemoryLimit(options));
  }
  PINION_RETURN_IF_ERROR(CheckRun(options, text));
  absl::PrintF("%s", HeaderText(options, device, text));
  std::fflush(stdout);  // before the first error
  return compare ? RunComparison(options, text, emulated) : RunOnce(options, text, emulated);
}

}  // namespace
}  // namespace pinion

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "trains a GPT on a text with its activations offloaded to host memory");
  const std::vector<char*> arguments = pinion::ParseFlags(argc, argv);
  absl::Status status = pinion::EnterWorkingDirectory();
  if (status.ok()) status = pinion::TrainGpt(arguments);
  if (status.ok()) return pinion::StopSignal() == 0 ? 0 : 128 + pinion::StopSignal();
  std::fprintf(stderr, "train_gpt: %s\n", std::string(status.message()).c_str());
  return 1;
}
