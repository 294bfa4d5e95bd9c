// Transfer counts, bytes, waits and times of a TransferEngine. Plain data.
//
//   const DirectionStats out = engine->GetStats().d2h;
//   EXPECT_EQ(out.submitted_bytes, out.completed_bytes + out.in_flight_bytes);

#ifndef PINION_ENGINE_STATS_ENGINE_STATS_H_
#define PINION_ENGINE_STATS_ENGINE_STATS_H_

#include <array>
#include <cstdint>
#include <string>

namespace pinion {

// Durations, all 0 if nothing was counted.
struct DurationSummary {
  uint64_t count = 0;
  double total_ms = 0;
  double p50_ms = 0;
  double p95_ms = 0;
  double p99_ms = 0;
  double max_ms = 0;

  std::string ToString() const;  // "12 x, 3.4 ms in all, p50 0.2, p95 0.4, p99 0.5, max 0.5 ms"
};

// A histogram of fixed size with logarithmic buckets.
//
//   octave    ... [1, 2) us                        [2, 4) us ...
//   buckets       16 of equal width, 1/16 us each  16, 1/8 us each
//
// Resolves durations from 1 ns to 2^40 ns (18 minutes). Shorter ones count as 0, longer ones as the
// longest. A percentile is the middle of its bucket, so its error is at most 1/32 (3.2 %). Count,
// total and maximum are exact.
//
// Thread safety: none; a value.
class DurationHistogram {
 public:
  // Counts a finite duration; negative ones (rounding of a clock) count as 0.
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

// Invariants: submitted_bytes == completed_bytes + in_flight_bytes; completed_transfers <=
// submitted_transfers <= submitted_chunks. A batch that failed half-way counts by its chunks alone.
struct DirectionStats {
  uint64_t submitted_transfers = 0;
  uint64_t submitted_chunks = 0;  // one per transfer; several for a large one
  uint64_t submitted_pieces = 0;  // as sent to the device, after merging neighbours
  uint64_t submitted_bytes = 0;
  uint64_t completed_transfers = 0;  // as of the last poll
  uint64_t completed_bytes = 0;
  uint64_t in_flight_bytes = 0;
  uint64_t failed_submits = 0;  // Submit calls that returned an error

  // With EngineOptions::time_transfers, as of the last poll.
  DurationSummary copy_time;   // of chunks, on the device
  DurationSummary stall_time;  // of streams, waiting for this direction's transfers
  uint64_t untimed = 0;        // chunks and waits whose events could not be recorded or read
};

struct EngineStats {
  DirectionStats h2d;
  DirectionStats d2h;
  uint64_t event_waits = 0;          // enqueued stream waits
  uint64_t event_waits_skipped = 0;  // skipped stream waits: the work was known to be done
  uint64_t transient_retries = 0;    // device calls repeated after a transient error

  std::string ToString() const;
};

}  // namespace pinion

#endif  // PINION_ENGINE_STATS_ENGINE_STATS_H_
