#include "pinion/bench/attribution/copy_bound.h"

#include <algorithm>

namespace pinion {
namespace {

constexpr double kBytesPerUs = 1e3;  // of one GB/s

double TimeUs(uint64_t size_bytes, double gb_per_s) {
  return static_cast<double>(size_bytes) / (gb_per_s * kBytesPerUs);
}

}  // namespace

double CopyBoundUs(const std::vector<ReadyTensor>& tensors, double step_us, const CopyRates& rates,
                   size_t most_waiting) {
  double stopped_us = 0;              // the step, so far
  double host_us = 0;                 // when the host is free
  std::vector<double> link_us = {0};  // when the link is free, before each of them
  for (size_t i = 0; i < tensors.size(); ++i) {
    const ReadyTensor& tensor = tensors[i];
    const double gone_us = i >= most_waiting ? link_us[i - most_waiting + 1] : 0;
    stopped_us = std::max(stopped_us, gone_us - tensor.ready_us);
    link_us.push_back(std::max(link_us.back(), tensor.ready_us + stopped_us) +
                      TimeUs(tensor.size_bytes, rates.link_gb_per_s));
    host_us = std::max(host_us, link_us.back()) +
              TimeUs(tensor.arithmetic_bytes, rates.host_memory_gb_per_s);
  }
  return std::max(step_us + stopped_us, host_us);
}

}  // namespace pinion
