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
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/bench_main.h"
#include "pinion/bench/goals.h"
#include "pinion/bench/weights/weights_case.h"

ABSL_FLAG(std::vector<std::string>, presets, {}, "of the emulated device; default: all");
ABSL_FLAG(bool, quick, false, "one batch size, two presets");

namespace pinion {
namespace {

using Kind = WeightsWay::Kind;
using Rows = std::vector<WeightsRow>;

constexpr double kOfBound = 0.95;
constexpr double kOfNoOffload = 1.03;

const char* ModeOf(bool training) { return training ? "training" : "inference"; }
double OfBound(const WeightsRow& row) { return row.bound.total_us() / row.cost.phase_us; }

// The row of the same preset, batch and mode.
const WeightsRow& Find(const Rows& rows, const WeightsRow& like, Kind kind) {
  return *std::find_if(rows.begin(), rows.end(), [&](const WeightsRow& row) {
    return row.preset == like.preset && row.batch == like.batch && row.training == like.training &&
           row.way.kind == kind;
  });
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
  if (row.way.streams()) {
    json["bound_us"] = row.bound.total_us();
    json["ends_us"] = row.bound.ends_us;
    json["of_bound"] = OfBound(row);
    json["is_hidden"] = row.is_hidden;
  }
  return json;
}

void AddGoals(const Rows& rows, BenchReport& report) {
  for (const bool training : {true, false}) {
    const std::string mode = ModeOf(training);
    // Of the rows of one mode with a WeightOffloader.
    const auto in_mode = [training](const auto& value) {
      return [=](const WeightsRow& row) -> std::optional<double> {
        if (row.training != training || !row.way.streams()) return std::nullopt;
        return value(row);
      };
    };
    for (const int window_layers : {2, 4, kModelLayers / 2}) {
      report.AddGoal(
          absl::StrCat(mode, ", windows of ", window_layers, " layers: bound over time, the least"),
          AtLeast(kOfBound), rows, in_mode([=](const WeightsRow& row) {
            return row.way.window_layers == window_layers ? std::optional(OfBound(row))
                                                          : std::nullopt;
          }));
    }
    for (const Kind kind : {Kind::kTarget, Kind::kShared}) {
      if (kind == Kind::kShared && !training) continue;
      const auto of_bound = in_mode([=](const WeightsRow& row) {
        return row.way.kind == kind ? std::optional(OfBound(row)) : std::nullopt;
      });
      report.AddGoal(
          absl::StrCat(mode, ", targets", kind == Kind::kShared ? " that activations share" : "",
                       ": bound over time, the least"),
          AtLeast(kOfBound), rows, of_bound);
    }
    const auto over_none = in_mode([&](const WeightsRow& row) {
      const double none_us = Find(rows, row, Kind::kNone).cost.phase_us;
      return row.is_hidden ? std::optional((row.cost.phase_us - row.bound.ends_us) / none_us)
                           : std::nullopt;
    });
    report.AddGoal(
        absl::StrCat(mode,
                     ", where the link hides the weights: time but for the two ends over no "
                     "offload"),
        AtMost(kOfNoOffload), rows, over_none);
    report.AddGoal(
        absl::StrCat(mode, ": time over blocking copies"), AtMost(1), rows,
        in_mode([&](const WeightsRow& row) {
          return std::optional(row.cost.phase_us / Find(rows, row, Kind::kBlocking).cost.phase_us);
        }));
  }
  report.AddNoneGoal("rows with other values than without offload", rows,
                     [](const WeightsRow& row) { return !row.same_values; });
  report.AddNoneGoal("rows with more on the device than their target", rows,
                     [](const WeightsRow& row) {
                       return row.target_bytes > 0 && row.cost.peak_bytes > row.target_bytes;
                     });
}

absl::Status Run(BenchReport& report) {
  const bool quick = absl::GetFlag(FLAGS_quick);
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
        PINION_ASSIGN_OR_RETURN(const Rows of_case, RunWeights(preset, batch, training));
        for (const WeightsRow& row : of_case) report.AddRow(JsonOf(row));
        report.PrintRows();
        rows.insert(rows.end(), of_case.begin(), of_case.end());
      }
    }
  }
  AddGoals(rows, report);
  return absl::OkStatus();
}

}  // namespace
}  // namespace pinion

int main(int argc, char** argv) {
  return pinion::BenchMain(argc, argv, "weights_bench", "the cost of weights on the host",
                           pinion::Run);
}
