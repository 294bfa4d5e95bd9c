// Benchmarks that may fail: Google Benchmark skips a case with an error and exits with 0 all the
// same.
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

  // A case that `measure` ends with an error, or by throwing what LibTorch throws, is skipped.
  benchmark::internal::Benchmark* Register(const std::string& name, Measure measure);

  // Runs the cases that the command line leaves. InvalidArgument if there are none.
  absl::Status Run();

  // Internal, with the cases that could not be measured and why.
  absl::Status failures() const;

 private:
  std::vector<std::string> failures_;
};

}  // namespace pinion

#endif  // PINION_BENCH_CHECKED_BENCHMARKS_H_
