#include "pinion/bench/bench_main.h"

#include <algorithm>
#include <cstdio>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_join.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/programs/command_line.h"
#include "pinion/programs/output_file.h"

ABSL_FLAG(std::string, json, "", "file to write rows and goals to");

namespace pinion {
namespace {

absl::Status Run(const std::vector<char*>& arguments, RunBench run) {
  if (arguments.size() > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", arguments[1], "\" is not a flag; see --help"));
  }
  PINION_RETURN_IF_ERROR(EnterWorkingDirectory());
  const std::string json = absl::GetFlag(FLAGS_json);
  if (!json.empty()) PINION_RETURN_IF_ERROR(CheckWritable(json));
  BenchReport report;
  const absl::Status ran = NoThrow("exception", [&] { return run(report); });
  if (report.goals().empty()) return ran;
  const absl::Status finished = report.Finish(json);
  return ran.ok() ? finished : ran;
}

}  // namespace

int BenchMain(int argc, char** argv, const char* name, const std::string& what, RunBench run) {
  absl::SetProgramUsageMessage(absl::StrCat(
      what, "\n  --json=FILE writes rows and goals. docs/results/benchmarks.md explains them."));
  return ExitCode(name, Run(ParseFlags(argc, argv), run));
}

absl::StatusOr<std::vector<std::string>> PresetsToRun(std::vector<std::string> asked, bool quick) {
  if (asked.empty() && quick) return std::vector<std::string>{"a100_pcie4", "gh200_c2c"};
  if (asked.empty()) return PresetNames();
  for (const std::string& preset : asked) PINION_RETURN_IF_ERROR(FindPreset(preset).status());
  return asked;
}

void CheckedBenchmarks::Register(const std::string& name, benchmark::TimeUnit unit,
                                 int64_t iterations, Measure measure) {
  const auto run = [this, name, measure = std::move(measure)](benchmark::State& state) {
    const absl::Status status = NoThrow("exception", [&] { return measure(state); });
    if (status.ok()) return;
    const std::string why = status.ToString();
    failures_.push_back(absl::StrCat(name, ": ", why));
    state.SkipWithError(why.c_str());
  };
  benchmark::RegisterBenchmark(name.c_str(), run)
      ->UseManualTime()
      ->Unit(unit)
      ->Iterations(iterations);
}

absl::Status CheckedBenchmarks::Run(absl::FunctionRef<void()> report) {
  const size_t matched = benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  if (matched == 0) return absl::InvalidArgumentError("--benchmark_filter leaves no case");
  std::printf("\n");
  report();
  if (failures_.empty()) return absl::OkStatus();
  return absl::InternalError(absl::StrJoin(failures_, "\n"));
}

int BenchmarksMain(int argc, char** argv, const char* name, const std::string& what, RunBench run) {
  // Google Benchmark would answer with its own flags alone.
  const auto asks_for_help = [](absl::string_view argument) { return argument == "--help"; };
  if (std::none_of(argv, argv + argc, asks_for_help)) benchmark::Initialize(&argc, argv);
  return BenchMain(argc, argv, name,
                   what + "\n  --benchmark_filter=REGEX and Google Benchmark's other flags.", run);
}

}  // namespace pinion
