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
// Thread safety: one thread, that of main.

#ifndef PINION_BENCH_BENCH_MAIN_H_
#define PINION_BENCH_BENCH_MAIN_H_

#include <benchmark/benchmark.h>

#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
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

// Returns the result of `run`, or for an exception an Internal error with its message, without
// LibTorch's stack.
template <typename Run>
auto NoThrow(const std::string& what, const Run& run) -> decltype(run()) {
  try {
    return run();
  } catch (const std::exception& error) {
    const absl::string_view why = error.what();
    return absl::InternalError(
        absl::StrCat(what, ": ", why.substr(0, why.find("\nException raised from"))));
  }
}

// Benchmarks of Google Benchmark whose errors fail the program. Google Benchmark itself skips a
// case with an error and exits with 0.
//
//   CheckedBenchmarks benchmarks;
//   benchmarks.Register("case", benchmark::kMicrosecond, /*iterations=*/5, [&](auto& state) {
//     return Measure(state);                       // calls state.SetIterationTime
//   });
//   return benchmarks.Run([&] { ... add what was measured to the report ... });
//
// It outlives Run.
class CheckedBenchmarks {
 public:
  using Measure = std::function<absl::Status(benchmark::State&)>;

  // Skips a case if `measure` returns an error or throws LibTorch's exceptions.
  void Register(const std::string& name, benchmark::TimeUnit unit, int64_t iterations,
                Measure measure);

  // Runs the cases that --benchmark_filter selects, then `report`. InvalidArgument if there are
  // none; Internal with the cases that failed, and their errors.
  absl::Status Run(absl::FunctionRef<void()> report);

 private:
  std::vector<std::string> failures_;
};

// BenchMain with the flags of Google Benchmark.
int BenchmarksMain(int argc, char** argv, const char* name, const std::string& what, RunBench run);

}  // namespace pinion

#endif  // PINION_BENCH_BENCH_MAIN_H_
