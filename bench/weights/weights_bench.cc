// Compares the cost of streaming weights from the host with a resident model and with copies by
// hand.
//
//   weights_bench                       three batch sizes on every preset of the emulated device
//   weights_bench --quick               one batch size, two presets
//   weights_bench --presets=a100_pcie4
//   weights_bench --json=FILE
//
// docs/results/benchmarks.md says how to read it.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/goals.h"
#include "pinion/bench/presets_to_run.h"
#include "pinion/bench/weights/weights_case.h"
#include "pinion/programs/command_line.h"
#include "pinion/programs/output_file.h"
#include "pinion/programs/working_directory.h"

ABSL_FLAG(std::vector<std::string>, presets, {}, "of the emulated device; default: all");
ABSL_FLAG(bool, quick, false, "one batch size, two presets");
ABSL_FLAG(std::string, json, "", "file to write rows and goals to");

namespace pinion {
namespace {

using Kind = WeightsWay::Kind;
using Rows = std::vector<WeightsRow>;

constexpr double kOfBound = 0.95;
constexpr double kOfNoOffload = 1.03;

double Mib(uint64_t bytes) { return static_cast<double>(bytes) / kMiB; }
const char* ModeOf(bool training) { return training ? "training" : "inference"; }
double OfBound(const WeightsRow& row) { return row.bound.total_us() / row.cost.phase_us; }

// The row of the same preset, batch and mode.
const WeightsRow& Find(const Rows& rows, const WeightsRow& like, Kind kind) {
  return *std::find_if(rows.begin(), rows.end(), [&](const WeightsRow& row) {
    return row.preset == like.preset && row.batch == like.batch && row.training == like.training &&
           row.way.kind == kind;
  });
}

// Returns the text of one case.
std::string TextOf(const Rows& rows) {
  std::string text = absl::StrFormat("%s on %s, a batch of %d (modelled)\n",
                                     ModeOf(rows[0].training), rows[0].preset, rows[0].batch);
  absl::StrAppendFormat(&text, "  %-21s %9s %9s %9s %9s %9s %9s %9s  %s\n", "", "phase us",
                        "step us", "peak MiB", "fetched", "gradients", "bound us", "of bound",
                        "values");
  for (const WeightsRow& row : rows) {
    absl::StrAppendFormat(&text, "  %-21s %9.1f %9.1f %9.2f %9.2f %9.2f", row.way.name(),
                          row.cost.phase_us, row.cost.host_step_us, Mib(row.cost.peak_bytes),
                          Mib(row.cost.fetched_bytes), Mib(row.cost.gradient_bytes));
    if (row.way.visits()) {
      absl::StrAppendFormat(&text, " %9.1f %9.3f", row.bound.total_us(), OfBound(row));
    } else {
      absl::StrAppendFormat(&text, " %9s %9s", "", "");
    }
    absl::StrAppend(&text, row.same_values ? "  same" : "  OTHERS", row.is_hidden ? ", hidden" : "",
                    "\n");
  }
  return text;
}

nlohmann::ordered_json JsonOf(const WeightsRow& row) {
  nlohmann::ordered_json json = {{"preset", row.preset},
                                 {"batch", row.batch},
                                 {"mode", ModeOf(row.training)},
                                 {"way", row.way.name()},
                                 {"phase_us", row.cost.phase_us},
                                 {"host_step_us", row.cost.host_step_us},
                                 {"compute_us", row.cost.compute_us},
                                 {"peak_mib", Mib(row.cost.peak_bytes)},
                                 {"fetched_mib", Mib(row.cost.fetched_bytes)},
                                 {"gradient_mib", Mib(row.cost.gradient_bytes)},
                                 {"same_values", row.same_values}};
  if (row.target_bytes > 0) json["target_mib"] = Mib(row.target_bytes);
  if (row.way.visits()) {
    json["bound_us"] = row.bound.total_us();
    json["ends_us"] = row.bound.ends_us;
    json["of_bound"] = OfBound(row);
    json["is_hidden"] = row.is_hidden;
  }
  return json;
}

// The greatest or least value of the rows of one mode with a WeightOffloader.
struct Worst {
  std::optional<double> value;
  int rows = 0;
};
Worst WorstOf(const Rows& rows, bool training, bool most,
              const std::function<std::optional<double>(const WeightsRow&)>& value) {
  Worst worst;
  for (const WeightsRow& row : rows) {
    if (row.training != training || !row.way.visits()) continue;
    const std::optional<double> of_row = value(row);
    if (!of_row.has_value()) continue;
    ++worst.rows;
    const double before = worst.value.value_or(*of_row);
    worst.value = most ? std::max(before, *of_row) : std::min(before, *of_row);
  }
  return worst;
}

BenchReport ReportOf(const Rows& rows) {
  BenchReport report;
  for (const WeightsRow& row : rows) report.AddRow(JsonOf(row));
  for (const bool training : {true, false}) {
    const std::string mode = ModeOf(training);
    for (const int window_layers : {2, 4, kModelLayers / 2}) {
      const Worst least = WorstOf(rows, training, /*most=*/false, [&](const WeightsRow& row) {
        return row.way.window_layers == window_layers ? std::optional(OfBound(row)) : std::nullopt;
      });
      report.AddGoal(
          absl::StrCat(mode, ", windows of ", window_layers, " layers: bound over time, the least"),
          AtLeast(kOfBound), least.value);
    }
    for (const Kind kind : {Kind::kTarget, Kind::kShared}) {
      if (kind == Kind::kShared && !training) continue;
      const Worst least = WorstOf(rows, training, /*most=*/false, [&](const WeightsRow& row) {
        return row.way.kind == kind ? std::optional(OfBound(row)) : std::nullopt;
      });
      report.AddGoal(absl::StrCat(mode, ", targets of ", least.rows, " rows",
                                  kind == Kind::kShared ? " that activations share" : "",
                                  ": bound over time, the least"),
                     AtLeast(kOfBound), least.value);
    }
    const Worst hidden = WorstOf(rows, training, /*most=*/true, [&](const WeightsRow& row) {
      const double none_us = Find(rows, row, Kind::kNone).cost.phase_us;
      return row.is_hidden ? std::optional((row.cost.phase_us - row.bound.ends_us) / none_us)
                           : std::nullopt;
    });
    report.AddGoal(absl::StrCat(mode, ", of ", hidden.rows,
                                " rows whose weights the link hides: time but for the two ends "
                                "over no offload"),
                   AtMost(kOfNoOffload), hidden.value);
    const Worst blocking = WorstOf(rows, training, /*most=*/true, [&](const WeightsRow& row) {
      return std::optional(row.cost.phase_us / Find(rows, row, Kind::kBlocking).cost.phase_us);
    });
    report.AddGoal(absl::StrCat(mode, ": time over blocking copies"), AtMost(1), blocking.value);
  }
  report.AddGoal(
      "rows with other values than without offload", AtMost(0),
      static_cast<double>(std::count_if(rows.begin(), rows.end(),
                                        [](const WeightsRow& r) { return !r.same_values; })));
  report.AddGoal(
      "rows with more on the device than their target", AtMost(0),
      static_cast<double>(std::count_if(rows.begin(), rows.end(), [](const WeightsRow& row) {
        return row.target_bytes > 0 && row.cost.peak_bytes > row.target_bytes;
      })));
  return report;
}

absl::Status Main() {
  const bool quick = absl::GetFlag(FLAGS_quick);
  const std::string json = absl::GetFlag(FLAGS_json);
  PINION_RETURN_IF_ERROR(EnterWorkingDirectory());
  if (!json.empty()) PINION_RETURN_IF_ERROR(CheckWritable(json));
  PINION_ASSIGN_OR_RETURN(const std::vector<std::string> presets,
                          PresetsToRun(absl::GetFlag(FLAGS_presets), quick));
  // The link hides hardly any weights of the smallest batch, and all of the largest on every
  // preset.
  const std::vector<int64_t> batches =
      quick ? std::vector<int64_t>{8} : std::vector<int64_t>{4, 16, 64};
  Rows rows;
  for (const std::string& preset : presets) {
    for (const int64_t batch : batches) {
      for (const bool training : {true, false}) {
        PINION_ASSIGN_OR_RETURN(const WeightsCase of, WeightsCase::Create(preset, batch, training));
        PINION_ASSIGN_OR_RETURN(const Rows of_case, of.RunAll());
        std::printf("%s\n", TextOf(of_case).c_str());
        std::fflush(stdout);
        rows.insert(rows.end(), of_case.begin(), of_case.end());
      }
    }
  }
  return ReportOf(rows).Finish(json);
}

}  // namespace
}  // namespace pinion

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("the cost of weights on the host; docs/results/benchmarks.md");
  pinion::ParseFlags(argc, argv);
  return pinion::ExitCode("weights_bench", pinion::Main());
}
