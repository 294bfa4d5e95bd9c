// Benchmarks of Google Benchmark whose errors fail the program. Google Benchmark itself skips a
// case with an error and exits with 0.
//
//   absl::Status Run(BenchReport& report) {
//     CheckedBenchmarks benchmarks;
//     benchmarks.Register("case", benchmark::kMicrosecond, /*iterations=*/5, [&](auto& state) {
//       return Measure(state);                       // calls state.SetIterationTime
//     });
//     return benchmarks.Run([&] { ... add what was measured to the report ... });
//   }
//   int main(int argc, char** argv) {
//     return pinion::BenchmarksMain(argc, argv, "plan_bench", "the cost of planning", pinion::Run);
//   }
//
// Thread safety: one thread. Ownership: it outlives Run.

#ifndef PINION_BENCH_CHECKED_BENCHMARKS_H_
#define PINION_BENCH_CHECKED_BENCHMARKS_H_

#include <benchmark/benchmark.h>

#include <functional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "pinion/bench/bench_main.h"

namespace pinion {

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

#endif  // PINION_BENCH_CHECKED_BENCHMARKS_H_
