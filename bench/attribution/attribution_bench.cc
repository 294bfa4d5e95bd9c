// Compares attribution to all blocks of a model by Captum and by Pinion: device memory, time,
// copies.
//
//   attribution_bench                       every model on every preset of the emulated device
//   attribution_bench --quick               one model, two presets
//   attribution_bench --models=unet --presets=a100_pcie4
//   attribution_bench --json=FILE
//
// docs/results/benchmarks.md says how to read it.

#include <chrono>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/attribution/attribution_case.h"
#include "pinion/bench/attribution/attribution_table.h"
#include "pinion/bench/bench_main.h"
#include "pinion/bench/goals.h"
#include "pinion/bench/offload/offload_model.h"

ABSL_FLAG(std::vector<std::string>, models, {}, "gpt, convnet, unet; default: all");
ABSL_FLAG(std::vector<std::string>, presets, {}, "of the emulated device; default: all");
ABSL_FLAG(bool, quick, false, "one model, two presets");

namespace pinion {
namespace {

absl::Status Run(BenchReport& report) {
  const auto begin = std::chrono::steady_clock::now();
  const bool quick = absl::GetFlag(FLAGS_quick);
  PINION_ASSIGN_OR_RETURN(
      const ModelsToRun run,
      FindModelsToRun(absl::GetFlag(FLAGS_models), absl::GetFlag(FLAGS_presets), quick));
  AttributionTable table;
  const auto add = [&report](const auto& rows, auto& all) {
    AddRows(rows, report);
    report.PrintRows();
    all.insert(all.end(), rows.begin(), rows.end());
  };
  for (const OffloadModel& model : run.models) {
    for (const std::string& preset : run.presets) {
      PINION_ASSIGN_OR_RETURN(const std::vector<AttributionRow> rows, RunWays(model, preset));
      add(rows, table.rows);
      if (!HasPaths(model)) continue;
      PINION_ASSIGN_OR_RETURN(const std::vector<PathRow> paths, RunPaths(model, preset, quick));
      add(paths, table.paths);
    }
  }
  table.minutes =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / 60;
  AddAttributionGoals(table, report);
  return absl::OkStatus();
}

}  // namespace
}  // namespace pinion

int main(int argc, char** argv) {
  return pinion::BenchMain(argc, argv, "attribution_bench", "the cost of attribution", pinion::Run);
}
