#include "pinion/examples/report.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/examples/compare.h"
#include "pinion/examples/text_data.h"
#include "pinion/examples/training_run.h"
#include "pinion/hooks/environment.h"
#include "pinion/programs/gpt_config.h"
#include "pinion/programs/run_options.h"

namespace pinion {
namespace {

constexpr int kBarWidth = 12;
constexpr int kPlainEvery = 10;

size_t TerminalWidth(FILE* file) {
  winsize size = {};
  return ioctl(fileno(file), TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col : 80;
}

std::string Bar(double fraction) {
  const int full = static_cast<int>(fraction * kBarWidth);
  return absl::StrCat("[", std::string(full, '#'), std::string(kBarWidth - full, '.'), "] ");
}

template <typename T>
nlohmann::ordered_json OrNull(const std::optional<T>& value) {
  return value ? nlohmann::ordered_json(*value) : nullptr;
}

std::string Verdict(const std::optional<bool>& bit_identical) {
  if (!bit_identical.has_value()) return "unknown***";
  return *bit_identical ? "yes" : "NO";
}

std::string Row(const ComparedRun& run, const RunResult& reference) {
  const RunResult& result = run.result;
  const bool offloads = run.offload != OffloadMode::kNone;
  const std::optional<uint64_t>& activations = result.peak_activation_bytes;
  const bool moves = offloads || run.offload_weights;
  const bool is_reference = !offloads && !run.checkpoint_blocks && !run.offload_weights;
  const bool is_incomparable = run.offload_weights && !run.bit_identical.has_value();
  const auto offload_only = [offloads](const std::string& cell) { return offloads ? cell : "-"; };
  const auto share = [](double value, double of) {
    return of > 0 ? absl::StrFormat(" (%3.0f %%)", 100 * value / of) : "";
  };
  return absl::StrFormat("  %-18s %11s %11s%-8s %9.2f ms%-8s %9s %10s %8s %9s  %s\n", run.Name(),
                         HumanBytes(result.peak_device_bytes),
                         activations.has_value() ? HumanBytes(*activations) : "-",
                         activations.has_value()
                             ? share(*activations, reference.peak_activation_bytes.value_or(0))
                             : "",
                         result.step_ms, share(result.step_ms, reference.step_ms),
                         result.stall_ms ? absl::StrFormat("%.2f ms", *result.stall_ms) : "-",
                         moves ? HumanBytes(static_cast<uint64_t>(result.bytes_moved)) : "-",
                         offload_only(absl::StrCat(result.pin_calls_after_warmup)),
                         offload_only(absl::StrFormat("%.1f us", result.pack_unpack_us)),
                         is_reference || is_incomparable ? "-" : Verdict(run.bit_identical));
}

// The means of the first and last ten steps, or with fewer than twenty the first and last step.
std::string LossText(const std::vector<float>& losses) {
  constexpr size_t kSteps = 10;
  if (losses.size() < 2 * kSteps) {
    return absl::StrFormat("loss     %.4f in the first step, %.4f in the last of %d\n",
                           losses.front(), losses.back(), losses.size());
  }
  const auto mean = [](auto begin) { return std::accumulate(begin, begin + kSteps, 0.0) / kSteps; };
  const double first = mean(losses.begin()), last = mean(losses.end() - kSteps);
  return absl::StrFormat("loss     %.4f in the first %d steps, %.4f in the last: %.0f %% lower\n",
                         first, kSteps, last, 100 * (1 - last / first));
}

}  // namespace

std::string PeakAndBound(const RunResult& streamed, const RunResult& resident) {
  const uint64_t activation_bytes = resident.peak_activation_bytes.value_or(0);
  return absl::StrCat("device peak ", HumanBytes(streamed.peak_device_bytes), ", bound ",
                      HumanBytes(streamed.two_layers_bytes + activation_bytes),
                      " (the two largest layers with their gradients ",
                      HumanBytes(streamed.two_layers_bytes), ", activations ",
                      HumanBytes(activation_bytes), " with all weights on the device)");
}

std::string HeaderText(const RunOptions& options, const std::string& device, const TextData& text) {
  const GptConfig& model = options.model;
  std::string header = absl::StrCat("device   ", options.device,
                                    device.empty() ? "" : ", modelled: " + device, "\n");
  absl::StrAppendFormat(
      &header,
      "model    GPT, %d layers of width %d, %d heads, %.2f million parameters, %s%s\n"
      "text     %d bytes, %d different ones; %d sequences of %d in a step\n",
      model.layers, model.width, model.heads, ParameterCount(model) / 1e6,
      model.bfloat16 ? "bfloat16" : "float32",
      model.checkpoint_blocks ? ", each layer a checkpoint" : "", text.size(), text.vocabulary(),
      model.batch, model.sequence);
  absl::StrAppendFormat(
      &header,
      "memory   %s; parameters, gradients and optimizer state %s, saved activations about %s%s\n",
      options.device_memory_bytes == UINT64_MAX
          ? "no limit"
          : absl::StrCat("limit ", HumanBytes(options.device_memory_bytes)),
      HumanBytes(PersistentBytes(model)), HumanBytes(SavedBytes(model)),
      model.checkpoint_blocks ? " without checkpoints" : "");
  if (const std::string on = SwitchesThatAreOn(); !on.empty()) {
    absl::StrAppend(&header, "switches ", on, "\n");
  }
  return header;
}

std::string SummaryText(const RunOptions& options, const RunResult& result, bool modelled) {
  std::string summary = LossText(result.losses);
  absl::StrAppendFormat(
      &summary, "memory   device peak %s%s; %s pinned on the host, in segments\n",
      HumanBytes(result.peak_device_bytes),
      result.peak_activation_bytes.has_value()
          ? absl::StrCat(", of which activations ", HumanBytes(*result.peak_activation_bytes))
          : "",
      HumanBytes(result.pinned_host_bytes));
  if (result.measured_steps == 0) {
    absl::StrAppendFormat(&summary,
                          "step     not measured: the first %d steps are warm-up; use --steps=%d "
                          "or more\n",
                          kWarmupSteps, 2 * kWarmupSteps);
  } else {
    absl::StrAppendFormat(
        &summary, "step     %.2f ms%s%s with --offload=%s; %.0f tokens/s (wall)\n", result.step_ms,
        modelled ? " (modelled)" : "",
        result.stall_ms ? absl::StrFormat(", %.2f ms stalled on the link", *result.stall_ms) : "",
        OffloadModeName(options.offload), result.tokens_per_s);
  }
  // The last plan's first line; --explain writes all of it.
  if (!result.plan.empty()) {
    absl::StrAppend(&summary, "plan     ", result.plan.substr(0, result.plan.find('\n')), "\n");
  }
  return summary;
}

ProgressPrinter::ProgressPrinter(FILE* file, bool modelled)
    : file_(file), modelled_(modelled), terminal_(isatty(fileno(file)) != 0) {}

ProgressPrinter::~ProgressPrinter() {
  if (line_open_) std::fputc('\n', file_);
}

void ProgressPrinter::Print(const StepProgress& progress) {
  const bool last = progress.step == progress.last_step;
  if (!terminal_ && progress.step != 1 && progress.step % kPlainEvery != 0 && !last) return;
  const std::string line = absl::StrFormat(
      "%*d/%d  loss %.4f  %.0f tok/s  device %s  host pinned %s  %.1f GB/s%s",
      static_cast<int>(absl::StrCat(progress.last_step).size()), progress.step, progress.last_step,
      progress.loss, progress.tokens_per_s, HumanBytes(progress.peak_device_bytes),
      HumanBytes(progress.pinned_host_bytes), progress.link_gb_per_s,
      modelled_ ? " (modelled)" : "");
  if (terminal_) {
    const double fraction = static_cast<double>(progress.step) / progress.last_step;
    // A wrapped line could not be rewritten.
    const std::string shown = absl::StrCat(Bar(fraction), line).substr(0, TerminalWidth(file_) - 1);
    std::fputs(absl::StrCat("\r\x1b[K", shown).c_str(), file_);
    line_open_ = true;
  } else {
    std::fputs(absl::StrCat("step ", line, "\n").c_str(), file_);
  }
  std::fflush(file_);
}

std::string ComparisonTable(const std::vector<ComparedGroup>& groups, bool modelled) {
  std::string table =
      absl::StrFormat("  %-18s %11s %19s %20s %9s %10s %8s %9s  %s\n", "offload", "device peak",
                      "peak activations", modelled ? "step (modelled)" : "step", "stalled",
                      "moved/step", "pins*", "host**", "bit-identical");
  for (const ComparedGroup& group : groups) {
    absl::StrAppend(&table, group.name, ": ", group.description, "\n");
    for (const ComparedRun& run : group.runs) {
      absl::StrAppend(&table, Row(run, group.runs.front().result));
    }
    for (const ComparedRun& run : group.runs) {
      if (!run.offload_weights) continue;
      const auto resident =
          std::find_if(group.runs.begin(), group.runs.end(), [&run](const ComparedRun& other) {
            return other.offload == run.offload && !other.checkpoint_blocks &&
                   !other.offload_weights;
          });
      if (resident == group.runs.end()) continue;
      absl::StrAppend(&table, "  ", run.Name(), ": ", PeakAndBound(run.result, resident->result),
                      "\n");
    }
  }
  absl::StrAppend(&table,
                  "  *  pinning calls after warm-up\n"
                  "  ** wall time of the host per saved tensor, pack and unpack",
                  modelled ? ", the emulated device's own work included\n" : "\n");
  if (!groups.front().runs.front().repeats_itself.value_or(true)) {
    absl::StrAppend(&table,
                    "  *** the run without offload does not repeat its own bits: its operators "
                    "are not deterministic\n");
  }
  if (const std::string on = SwitchesThatAreOn(); !on.empty()) {
    absl::StrAppend(&table, "  measured with ", on, "\n");
  }
  return table;
}

std::string ToJson(const std::vector<ComparedGroup>& groups) {
  nlohmann::ordered_json runs = nlohmann::ordered_json::array();
  for (const ComparedGroup& group : groups) {
    for (const ComparedRun& run : group.runs) {
      const RunResult& result = run.result;
      nlohmann::ordered_json json;
      json["name"] = run.Name();
      json["preset"] = group.name;
      json["losses"] = result.losses;
      json["peak_device_bytes"] = result.peak_device_bytes;
      json["peak_activation_bytes"] = OrNull(result.peak_activation_bytes);
      json["two_layers_bytes"] =
          run.offload_weights ? nlohmann::ordered_json(result.two_layers_bytes) : nullptr;
      const auto measured = [&result](const auto& value) {
        return result.measured_steps > 0 ? nlohmann::ordered_json(value) : nullptr;
      };
      json["measured_steps"] = result.measured_steps;
      json["step_ms"] = measured(result.step_ms);
      json["stall_ms"] = OrNull(result.stall_ms);
      json["bytes_moved"] = measured(result.bytes_moved);
      json["tokens_per_s"] = measured(result.tokens_per_s);
      json["pin_calls_after_warmup"] = measured(result.pin_calls_after_warmup);
      json["pack_unpack_us"] = measured(result.pack_unpack_us);
      json["bit_identical"] = OrNull(run.bit_identical);
      json["repeats_itself"] = OrNull(run.repeats_itself);
      runs.push_back(std::move(json));
    }
  }
  return nlohmann::ordered_json{{"runs", std::move(runs)}}.dump(1) + "\n";
}

}  // namespace pinion
