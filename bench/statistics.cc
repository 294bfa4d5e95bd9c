#include "pinion/bench/statistics.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "pinion/allocator/base/check.h"

namespace pinion {

double Quantile(const std::vector<double>& sorted, double share) {
  PINION_CHECK(!sorted.empty()) << "no values";
  const double position = share * static_cast<double>(sorted.size() - 1);
  const size_t below = static_cast<size_t>(position);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return std::lerp(sorted[below], sorted[above], position - static_cast<double>(below));
}

Summary Summarize(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  Summary summary;
  summary.samples = static_cast<int>(values.size());
  summary.median = Quantile(values, 0.5);
  summary.p5 = Quantile(values, 0.05);
  summary.p95 = Quantile(values, 0.95);
  if (values.size() > 1) {
    const double count = static_cast<double>(values.size());
    const double mean = std::accumulate(values.begin(), values.end(), 0.0) / count;
    double squares = 0;
    for (const double value : values) squares += (value - mean) * (value - mean);
    summary.cv = std::sqrt(squares / (count - 1)) / mean;
  }
  return summary;
}

}  // namespace pinion
