#include "pinion/bench/attribution/copy_bound.h"

#include <algorithm>
#include <cstddef>

namespace pinion {
namespace {

constexpr double kBytesPerUs = 1e3;  // of one GB/s

double TimeUs(uint64_t size_bytes, double gb_per_s) {
  return static_cast<double>(size_bytes) / (gb_per_s * kBytesPerUs);
}

}  // namespace

double CopyBoundUs(const std::vector<ReadyTensor>& tensors, double step_us, const CopyRates& rates,
                   CopyMemory memory) {
  double stopped_us = 0;              // stalls of the step
  double host_us = 0;                 // when the host is free
  std::vector<double> link_us = {0};  // when the link is free for each tensor
  size_t oldest = 0;                  // tensor that may still be on the device
  uint64_t held_bytes = 0;            // on the device if copies are as late as allowed
  uint64_t largest_bytes = 0, second_bytes = 0;
  for (const ReadyTensor& tensor : tensors) {
    second_bytes = std::max(second_bytes, std::min(largest_bytes, tensor.size_bytes));
    largest_bytes = std::max(largest_bytes, tensor.size_bytes);
    held_bytes += tensor.size_bytes;
    double gone_us = 0;
    while (memory == CopyMemory::kForTwoLargest && held_bytes > largest_bytes + second_bytes) {
      held_bytes -= tensors[oldest].size_bytes;
      gone_us = link_us[++oldest];
    }
    stopped_us = std::max(stopped_us, gone_us - tensor.ready_us);
    link_us.push_back(std::max(link_us.back(), tensor.ready_us + stopped_us) +
                      TimeUs(tensor.size_bytes, rates.link_gb_per_s));
    host_us = std::max(host_us, link_us.back()) +
              TimeUs(tensor.arithmetic_bytes, rates.host_memory_gb_per_s);
  }
  return std::max(step_us + stopped_us, host_us);
}

}  // namespace pinion
