// The rows and goals of hooks_bench. docs/results/benchmarks.md explains them.
//
// Thread safety: values.

#ifndef PINION_BENCH_HOOKS_REPORT_H_
#define PINION_BENCH_HOOKS_REPORT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "pinion/allocator/base/bytes.h"
#include "pinion/bench/goals.h"
#include "pinion/bench/recorded_step.h"
#include "pinion/bench/saving_step.h"

namespace pinion {

inline constexpr int kFewTensors = 100;
inline constexpr int kManyTensors = 5000;
inline constexpr uint64_t kSmallBytes = 4 * kKiB;

struct HooksCase {
  SavingStep step;
  bool leaves = false;  // whether tensors beyond the window are evicted
  int threads = 1;

  std::string Name() const;
};

struct HooksRow {
  HooksCase of;
  // Wall time of a step, per tensor.
  double none_us = 0;
  double nothing_us = 0;  // hooks that do nothing, less none_us
  double pinion_us = 0;   // less none_us
  double device_calls = 0;
  double capture_queries = 0;       // on the default stream, like all times
  double capture_queries_side = 0;  // on another stream
};

BenchReport HooksReport(const std::vector<HooksRow>& rows,
                        const std::vector<RecordedStepCost>& recorded);

}  // namespace pinion

#endif  // PINION_BENCH_HOOKS_REPORT_H_
