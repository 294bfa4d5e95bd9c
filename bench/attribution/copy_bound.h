// A lower bound on the time of attribution with results on the host. A pure function.
//
// Tensors become ready during the step. They cross one link in order, at its bandwidth and without
// fixed costs. The host computes with each tensor after its copy. With memory for the two largest
// tensors only, the step stalls before it makes a tensor for which there is no room beside pending
// copies.

#ifndef PINION_BENCH_ATTRIBUTION_COPY_BOUND_H_
#define PINION_BENCH_ATTRIBUTION_COPY_BOUND_H_

#include <cstdint>
#include <vector>

namespace pinion {

struct ReadyTensor {
  double ready_us = 0;            // since the step began
  uint64_t size_bytes = 0;        // copied over the link
  uint64_t arithmetic_bytes = 0;  // of host memory, read and written once the tensor is there
};

struct CopyRates {
  double link_gb_per_s = 0;
  double host_memory_gb_per_s = 0;
};

enum class CopyMemory { kForAll, kForTwoLargest };

// `tensors` are in the order of ready_us; the step alone takes `step_us`.
double CopyBoundUs(const std::vector<ReadyTensor>& tensors, double step_us, const CopyRates& rates,
                   CopyMemory memory = CopyMemory::kForAll);

}  // namespace pinion

#endif  // PINION_BENCH_ATTRIBUTION_COPY_BOUND_H_
