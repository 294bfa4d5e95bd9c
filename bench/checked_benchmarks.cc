#include "pinion/bench/checked_benchmarks.h"

#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace pinion {

benchmark::internal::Benchmark* CheckedBenchmarks::Register(const std::string& name,
                                                            Measure measure) {
  return benchmark::RegisterBenchmark(
      name.c_str(), [this, name, measure = std::move(measure)](benchmark::State& state) {
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
      });
}

absl::Status CheckedBenchmarks::Run() {
  const size_t matched = benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  if (matched == 0) return absl::InvalidArgumentError("--benchmark_filter leaves no case");
  return absl::OkStatus();
}

absl::Status CheckedBenchmarks::failures() const {
  if (failures_.empty()) return absl::OkStatus();
  return absl::InternalError(absl::StrJoin(failures_, "\n"));
}

}  // namespace pinion
