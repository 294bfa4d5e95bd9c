// A duration histogram of fixed size with logarithmic buckets: percentiles, total and maximum.
//
//   octave    ... [1, 2) us                        [2, 4) us ...
//   buckets       16 of equal width, 1/16 us each  16, 1/8 us each
//
// Resolves durations from 1 ns to 2^40 ns (18 minutes). Shorter ones count as 0, longer ones as the
// longest. A percentile is the middle of its bucket, so its error is at most 1/32 (3.2 %). Count,
// total and maximum are exact.
//
// Thread safety: none; a value.

#ifndef PINION_ENGINE_STATS_DURATION_HISTOGRAM_H_
#define PINION_ENGINE_STATS_DURATION_HISTOGRAM_H_

#include <array>
#include <cstdint>
#include <string>

namespace pinion {

// All 0 if nothing was counted.
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
  // Counts a duration; negative ones (rounding of a clock) count as 0.
  void Add(double duration_ms);

  // Returns the smallest duration that at least `share` (0 < share <= 1) of all do not exceed.
  double PercentileMs(double share) const;

  DurationSummary Summary() const;

 private:
  static constexpr int kOctaves = 40;
  static constexpr int kBucketsPerOctave = 16;
  // Bucket 0 is for durations below 1 ns.
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
