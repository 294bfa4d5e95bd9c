// How long things took: a histogram with logarithmic buckets, small and of fixed size.
//
//   octave    ... [1, 2) us                        [2, 4) us ...
//   buckets       16 of equal width, 1/16 us each  16, 1/8 us each
//
// Durations from 1 ns to 2^40 ns (18 minutes) are told apart; shorter ones count as 0, longer ones
// as the longest. A percentile is the middle of the bucket that holds it, so it is off by at most
// 1/32 (3.2 %) of its value. Count, total and maximum are exact.
//
// Thread safety: none; a value.

#ifndef PINION_ENGINE_STATS_DURATION_HISTOGRAM_H_
#define PINION_ENGINE_STATS_DURATION_HISTOGRAM_H_

#include <array>
#include <cstdint>
#include <string>

namespace pinion {

// All 0 when nothing was counted.
struct DurationSummary {
  uint64_t count = 0;
  double total_ms = 0;
  double p50_ms = 0;
  double p95_ms = 0;
  double p99_ms = 0;
  double max_ms = 0;

  std::string ToString() const;  // "12 x, 3.4 ms in all, p50 0.2, p95 0.4, p99 0.5, max 0.5 ms"
};

class DurationHistogram {
 public:
  // Negative durations (a clock's rounding) count as 0.
  void Add(double duration_ms);

  // The smallest duration that at least `share` (0 < share <= 1) of all are not longer than.
  double PercentileMs(double share) const;

  DurationSummary Summary() const;

 private:
  static constexpr int kOctaves = 40;
  static constexpr int kBucketsPerOctave = 16;
  // Bucket 0 is for what is shorter than 1 ns.
  static constexpr int kLastBucket = kOctaves * kBucketsPerOctave;

  static int BucketOf(double duration_ns);
  static double MiddleNs(int bucket);

  std::array<uint64_t, kLastBucket + 1> counts_ = {};
  uint64_t count_ = 0;
  double total_ms_ = 0;
  double max_ms_ = 0;
};

}  // namespace pinion

#endif  // PINION_ENGINE_STATS_DURATION_HISTOGRAM_H_
