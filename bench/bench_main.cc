#include "pinion/bench/bench_main.h"

#include <exception>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/programs/command_line.h"
#include "pinion/programs/output_file.h"
#include "pinion/programs/working_directory.h"

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
  absl::Status ran;
  try {
    ran = run(report);
  } catch (const std::exception& error) {
    const absl::string_view what = error.what();
    // LibTorch's errors add a stack.
    ran = absl::InternalError(what.substr(0, what.find("\nException raised from")));
  }
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

}  // namespace pinion
