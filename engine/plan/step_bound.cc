#include "pinion/engine/plan/step_bound.h"

#include <algorithm>
#include <limits>

namespace pinion {
namespace {

template <typename Iterator>
double ForwardMs(Iterator begin, Iterator end, double memory_bytes, double bytes_per_ms) {
  double elapsed_ms = 0;
  double live_bytes = 0;
  for (Iterator op = begin; op != end; ++op) {
    const double saved_bytes = static_cast<double>(op->saved_bytes);
    if (saved_bytes > memory_bytes) return std::numeric_limits<double>::infinity();
    const double excess_bytes = live_bytes + saved_bytes - memory_bytes;
    if (excess_bytes > 0) {
      elapsed_ms += excess_bytes / bytes_per_ms;
      live_bytes -= excess_bytes;
    }
    elapsed_ms += op->compute_ms;
    live_bytes = std::max(0.0, live_bytes - op->compute_ms * bytes_per_ms) + saved_bytes;
  }
  return elapsed_ms;
}

}  // namespace

double StepTrace::compute_ms() const {
  double total_ms = 0;
  for (const TraceOperator& op : forward) total_ms += op.compute_ms;
  for (const TraceOperator& op : backward) total_ms += op.compute_ms;
  return total_ms;
}

double StepLowerBoundMs(const StepTrace& trace, uint64_t memory_bytes, const LinkRate& rate) {
  const double memory = static_cast<double>(memory_bytes);
  return ForwardMs(trace.forward.begin(), trace.forward.end(), memory, rate.out_bytes_per_ms) +
         ForwardMs(trace.backward.rbegin(), trace.backward.rend(), memory, rate.in_bytes_per_ms);
}

}  // namespace pinion
