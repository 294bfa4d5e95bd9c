// Benchmarks whose errors fail the program. Google Benchmark skips a case with an error and exits
// with 0.
//
//   CheckedBenchmarks benchmarks;
//   benchmarks.Register("case", [&](benchmark::State& state) { return Measure(state); });
//   PINION_RETURN_IF_ERROR(benchmarks.Run());
//   ... print what was measured ...
//   PINION_RETURN_IF_ERROR(benchmarks.failures());
//
// Thread safety: one thread. Ownership: it outlives Run.

#ifndef PINION_BENCH_CHECKED_BENCHMARKS_H_
#define PINION_BENCH_CHECKED_BENCHMARKS_H_

#include <benchmark/benchmark.h>

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace pinion {

class CheckedBenchmarks {
 public:
  using Measure = std::function<absl::Status(benchmark::State&)>;

  // Skips a case if `measure` returns an error or throws LibTorch's exceptions.
  benchmark::internal::Benchmark* Register(const std::string& name, Measure measure);

  // Runs the cases that --benchmark_filter selects. InvalidArgument if there are none.
  absl::Status Run();

  // Returns Internal with the cases that failed, and their errors.
  absl::Status failures() const;

 private:
  std::vector<std::string> failures_;
};

}  // namespace pinion

#endif  // PINION_BENCH_CHECKED_BENCHMARKS_H_
