#include "pinion/engine/stats/engine_stats.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "absl/strings/str_format.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"

namespace pinion {
namespace {

constexpr double kNsPerMs = 1e6;

void Print(std::ostream& out, const char* name, const DirectionStats& stats) {
  out << name << ": " << stats.submitted_transfers << " transfers ("
      << HumanBytes(stats.submitted_bytes) << " in " << stats.submitted_pieces << " pieces and "
      << stats.submitted_chunks << " chunks), " << stats.completed_transfers << " completed, "
      << HumanBytes(stats.in_flight_bytes) << " in flight, " << stats.failed_submits
      << " failed submits\n";
  if (stats.copy_time.count + stats.stall_time.count + stats.untimed == 0) return;
  out << "  copies " << stats.copy_time.ToString() << "\n  stalls " << stats.stall_time.ToString()
      << "; " << stats.untimed << " not timed\n";
}

}  // namespace

std::string DurationSummary::ToString() const {
  return absl::StrFormat("%d x, %.4g ms in all, p50 %.4g, p95 %.4g, p99 %.4g, max %.4g ms", count,
                         total_ms, p50_ms, p95_ms, p99_ms, max_ms);
}

int DurationHistogram::BucketOf(double duration_ns) {
  if (duration_ns < 1) return 0;
  int exponent = 0;
  const double fraction = std::frexp(duration_ns, &exponent);  // in [0.5, 1)
  const int within = static_cast<int>((2 * fraction - 1) * kBucketsPerOctave);
  return std::min(1 + (exponent - 1) * kBucketsPerOctave + within, kLastBucket);
}

double DurationHistogram::MiddleNs(int bucket) {
  if (bucket == 0) return 0;
  const int octave = (bucket - 1) / kBucketsPerOctave;
  const int within = (bucket - 1) % kBucketsPerOctave;
  return std::ldexp(1 + (within + 0.5) / kBucketsPerOctave, octave);
}

void DurationHistogram::Add(double duration_ms) {
  PINION_CHECK(std::isfinite(duration_ms))
      << "a duration of " << duration_ms << " ms; it must be finite";
  duration_ms = std::max(duration_ms, 0.0);
  ++counts_[BucketOf(duration_ms * kNsPerMs)];
  ++count_;
  total_ms_ += duration_ms;
  max_ms_ = std::max(max_ms_, duration_ms);
}

double DurationHistogram::PercentileMs(double share) const {
  PINION_CHECK(share > 0 && share <= 1)
      << "a percentile of " << share << "; the share must be above 0 and at most 1";
  const auto rank = static_cast<uint64_t>(std::ceil(share * static_cast<double>(count_)));
  int bucket = 0;
  for (uint64_t seen = counts_[0]; seen < rank; seen += counts_[bucket]) ++bucket;
  return std::min(MiddleNs(bucket) / kNsPerMs, max_ms_);
}

DurationSummary DurationHistogram::Summary() const {
  return {.count = count_,
          .total_ms = total_ms_,
          .p50_ms = PercentileMs(0.50),
          .p95_ms = PercentileMs(0.95),
          .p99_ms = PercentileMs(0.99),
          .max_ms = max_ms_};
}

std::string EngineStats::ToString() const {
  std::ostringstream out;
  Print(out, "D2H", d2h);
  Print(out, "H2D", h2d);
  out << "event waits: " << event_waits << " enqueued, " << event_waits_skipped << " not needed\n"
      << "transient retries: " << transient_retries << "\n";
  return out.str();
}

}  // namespace pinion
