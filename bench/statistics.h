// Summaries of a few measurements. Pure.

#ifndef PINION_BENCH_STATISTICS_H_
#define PINION_BENCH_STATISTICS_H_

#include <vector>

namespace pinion {

struct Summary {
  int samples = 0;
  double median = 0;
  double p5 = 0;
  double p95 = 0;
  double cv = 0;  // coefficient of variation: standard deviation / mean, as a fraction; 0 for one
};

// Returns the value below which `share` of the sorted, nonempty values lie, linearly interpolated
// between its neighbours.
double Quantile(const std::vector<double>& sorted, double share);

// Summarizes at least one value, in any order.
Summary Summarize(std::vector<double> values);

}  // namespace pinion

#endif  // PINION_BENCH_STATISTICS_H_
