#include "pinion/bench/attribution/copy_bound.h"

#include <algorithm>

namespace pinion {
namespace {

constexpr double kBytesPerUs = 1e3;  // of one GB/s

double TimeUs(uint64_t size_bytes, double gb_per_s) {
  return static_cast<double>(size_bytes) / (gb_per_s * kBytesPerUs);
}

}  // namespace

double CopyBoundUs(const std::vector<ReadyTensor>& tensors, double step_us,
                   const CopyRates& rates) {
  double link_us = 0, host_us = 0;  // when each is free
  for (const ReadyTensor& tensor : tensors) {
    link_us = std::max(link_us, tensor.ready_us) + TimeUs(tensor.size_bytes, rates.link_gb_per_s);
    host_us =
        std::max(host_us, link_us) + TimeUs(tensor.arithmetic_bytes, rates.host_memory_gb_per_s);
  }
  return std::max(step_us, host_us);
}

}  // namespace pinion
