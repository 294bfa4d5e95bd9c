#include "pinion/bench/checked_benchmarks.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace pinion {

void CheckedBenchmarks::Register(const std::string& name, benchmark::TimeUnit unit,
                                 int64_t iterations, Measure measure) {
  const auto run = [this, name, measure = std::move(measure)](benchmark::State& state) {
    std::string why;
    try {
      const absl::Status status = measure(state);
      if (status.ok()) return;
      why = status.ToString();
    } catch (const std::exception& error) {
      why = error.what();
    }
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
  const auto asks_for_help = [](std::string_view argument) { return argument == "--help"; };
  if (std::none_of(argv, argv + argc, asks_for_help)) benchmark::Initialize(&argc, argv);
  return BenchMain(argc, argv, name,
                   what + "\n  --benchmark_filter=REGEX and Google Benchmark's other flags.", run);
}

}  // namespace pinion
