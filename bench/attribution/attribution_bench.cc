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
#include <cstdio>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/bench/attribution/attribution_case.h"
#include "pinion/bench/attribution/attribution_table.h"
#include "pinion/bench/attribution/path_case.h"
#include "pinion/bench/attribution/path_table.h"
#include "pinion/bench/goals.h"
#include "pinion/bench/offload/models_to_run.h"
#include "pinion/bench/offload/offload_model.h"
#include "pinion/programs/command_line.h"
#include "pinion/programs/output_file.h"
#include "pinion/programs/working_directory.h"

ABSL_FLAG(std::vector<std::string>, models, {}, "gpt, convnet, unet; default: all");
ABSL_FLAG(std::vector<std::string>, presets, {}, "of the emulated device; default: all");
ABSL_FLAG(bool, quick, false, "one model, two presets");
ABSL_FLAG(std::string, json, "", "file to write rows and goals to");

namespace pinion {
namespace {

absl::Status Main() {
  const auto begin = std::chrono::steady_clock::now();
  const bool quick = absl::GetFlag(FLAGS_quick);
  const std::string json = absl::GetFlag(FLAGS_json);
  PINION_RETURN_IF_ERROR(EnterWorkingDirectory());
  if (!json.empty()) PINION_RETURN_IF_ERROR(CheckWritable(json));
  PINION_ASSIGN_OR_RETURN(
      const ModelsToRun run,
      FindModelsToRun(absl::GetFlag(FLAGS_models), absl::GetFlag(FLAGS_presets), quick));
  AttributionTable table;
  for (const OffloadModel& model : run.models) {
    for (const std::string& preset : run.presets) {
      PINION_ASSIGN_OR_RETURN(const AttributionCase of, AttributionCase::Create(model, preset));
      PINION_ASSIGN_OR_RETURN(const std::vector<AttributionRow> rows, of.RunAll());
      std::printf("%s\n", AttributionText(rows).c_str());
      std::fflush(stdout);
      table.rows.insert(table.rows.end(), rows.begin(), rows.end());
      if (!HasPaths(model)) continue;
      PINION_ASSIGN_OR_RETURN(const std::vector<PathRow> paths, RunPaths(model, preset, quick));
      std::printf("%s\n", PathText(paths).c_str());
      std::fflush(stdout);
      table.paths.insert(table.paths.end(), paths.begin(), paths.end());
    }
  }
  table.minutes =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / 60;
  return AttributionReport(table).Finish(json);
}

}  // namespace
}  // namespace pinion

int main(int argc, char** argv) {
  absl::SetProgramUsageMessage("the cost of attribution; docs/results/benchmarks.md");
  pinion::ParseFlags(argc, argv);
  return pinion::ExitCode("attribution_bench", pinion::Main());
}
