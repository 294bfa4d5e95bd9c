// What no attribution that brings its results to the host can beat: a pure function.
//
// Tensors become ready in the course of the step that makes them, cross one link one behind the
// other, at its bandwidth and without fixed costs, and the host computes with each of them once it
// has it. Where the device has memory for what waits or is under way that is as large as the two
// largest tensors so far, the step stops before it makes one for which that has no room.

#ifndef PINION_BENCH_ATTRIBUTION_COPY_BOUND_H_
#define PINION_BENCH_ATTRIBUTION_COPY_BOUND_H_

#include <cstdint>
#include <vector>

namespace pinion {

struct ReadyTensor {
  double ready_us = 0;            // since the step began
  uint64_t size_bytes = 0;        // that cross the link
  uint64_t arithmetic_bytes = 0;  // of host memory, read and written once the tensor is there
};

struct CopyRates {
  double link_gb_per_s = 0;
  double host_memory_gb_per_s = 0;
};

enum class CopyMemory { kForAll, kForTwoLargest };

// `tensors` in the order in which they become ready; the step by itself takes `step_us`.
double CopyBoundUs(const std::vector<ReadyTensor>& tensors, double step_us, const CopyRates& rates,
                   CopyMemory memory = CopyMemory::kForAll);

}  // namespace pinion

#endif  // PINION_BENCH_ATTRIBUTION_COPY_BOUND_H_
