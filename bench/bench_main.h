// The frame of a benchmark program: the flag --json, the checks of the command line, and the exit
// status.
//
//   absl::Status Run(BenchReport& report) {
//     ... report.AddRow(...); report.AddGoal(...); ...
//   }
//   int main(int argc, char** argv) {
//     return pinion::BenchMain(argc, argv, "step_bench", "the cost of offloading", pinion::Run);
//   }
//
// Thread safety: call it in main.

#ifndef PINION_BENCH_BENCH_MAIN_H_
#define PINION_BENCH_BENCH_MAIN_H_

#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/bench/goals.h"

namespace pinion {

// Fills the report. After an error the report is printed and written if it has goals.
using RunBench = absl::FunctionRef<absl::Status(BenchReport& report)>;

// Calls `run` in the folder of the command, prints the goals and writes --json. Errors of the
// command line, among them a file that cannot be written, come first. Returns ExitCode's value.
int BenchMain(int argc, char** argv, const char* name, const std::string& what, RunBench run);

// Returns `asked`; else all presets, or for a quick run one with a slow and one with a fast link.
// NotFound lists the presets.
absl::StatusOr<std::vector<std::string>> PresetsToRun(std::vector<std::string> asked, bool quick);

}  // namespace pinion

#endif  // PINION_BENCH_BENCH_MAIN_H_
