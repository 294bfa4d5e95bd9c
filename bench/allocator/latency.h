// Wall-clock time of calls that take nanoseconds.

#ifndef PINION_BENCH_ALLOCATOR_LATENCY_H_
#define PINION_BENCH_ALLOCATOR_LATENCY_H_

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

#include "pinion/bench/statistics.h"

namespace pinion {

inline double NowNs() {
  return std::chrono::duration<double, std::nano>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Returns the time between two consecutive readings of the clock.
inline double ClockOverheadNs() {
  static const double overhead = [] {
    std::vector<double> samples(10'001);
    for (double& sample : samples) {
      const double start = NowNs();
      sample = NowNs() - start;
    }
    return Summarize(samples).median;
  }();
  return overhead;
}

// Times single calls, without the time of reading the clock.
class CallTimes {
 public:
  explicit CallTimes(size_t expected) { samples_.reserve(expected); }

  template <typename Call>
  auto Time(const Call& call) {
    struct Note {
      CallTimes& times;
      const double start = NowNs();
      ~Note() { times.samples_.push_back(std::max(0.0, NowNs() - start - ClockOverheadNs())); }
    } note{*this};
    return call();
  }
  void Merge(const CallTimes& other) {
    samples_.insert(samples_.end(), other.samples_.begin(), other.samples_.end());
  }
  double PercentileNs(double fraction) {
    std::sort(samples_.begin(), samples_.end());
    return Quantile(samples_, fraction);
  }

 private:
  std::vector<double> samples_;
};

}  // namespace pinion

#endif  // PINION_BENCH_ALLOCATOR_LATENCY_H_
