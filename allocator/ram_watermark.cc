#include "pinion/allocator/ram_watermark.h"

#include <algorithm>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"

namespace pinion {
namespace {

constexpr absl::Duration kWarningInterval = absl::Minutes(1);

// The percentage in use once `taken_bytes` more are.
double PercentAfter(const RamSample& sample, uint64_t taken_bytes) {
  if (sample.total_bytes == 0) return 0;
  const uint64_t available = sample.available_bytes - std::min(sample.available_bytes, taken_bytes);
  return 100.0 * static_cast<double>(sample.total_bytes - available) /
         static_cast<double>(sample.total_bytes);
}

}  // namespace

RamWatermark::RamWatermark(const AllocatorOptions& options, RamProbe probe,
                           std::function<absl::Time()> clock)
    : options_(options), probe_(std::move(probe)), clock_(std::move(clock)) {}

absl::StatusOr<RamWatermark::Growth> RamWatermark::AdmitGrowth(uint64_t size_bytes) {
  // Taken before the sample: a growth that is committed in between counts twice rather than never.
  uint64_t taken_bytes;
  {
    MutexLock lock(mu_);
    reserved_bytes_ += size_bytes;
    taken_bytes = reserved_bytes_;
  }
  Growth growth(this, size_bytes);
  const RamSample sample = probe_.Sample();
  const double percent = PercentAfter(sample, taken_bytes);
  const std::string numbers =
      absl::StrFormat("to take %s more, with %s of %s in use (%.1f %%)", HumanBytes(taken_bytes),
                      HumanBytes(sample.total_bytes - sample.available_bytes),
                      HumanBytes(sample.total_bytes), sample.percent);
  if (percent > options_.high_percent) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("%s, would put the host's RAM at %.1f %%, above high_percent (%g)", numbers,
                        percent, options_.high_percent));
  }
  if (taken_bytes > sample.headroom_bytes) {
    return absl::ResourceExhaustedError(absl::StrFormat("%s, does not fit the %s that %s leaves",
                                                        numbers, HumanBytes(sample.headroom_bytes),
                                                        sample.limited_by));
  }
  if (percent > options_.warn_percent) Warn(sample, percent);
  return growth;
}

uint64_t RamWatermark::BytesToGiveBack(uint64_t growth_bytes) const {
  uint64_t taken_bytes;
  {
    MutexLock lock(mu_);
    taken_bytes = reserved_bytes_ + growth_bytes;
  }
  const RamSample sample = probe_.Sample();
  uint64_t bytes = 0;
  if (PercentAfter(sample, taken_bytes) > options_.high_percent) {
    const double used = static_cast<double>(sample.total_bytes - sample.available_bytes);
    const double allowed = options_.low_percent / 100.0 * static_cast<double>(sample.total_bytes);
    if (used > allowed) bytes = static_cast<uint64_t>(used - allowed) + 1;
  }
  if (taken_bytes > sample.headroom_bytes) {
    bytes = std::max(bytes, taken_bytes - sample.headroom_bytes);
  }
  return bytes;
}

uint64_t RamWatermark::warnings() const {
  MutexLock lock(mu_);
  return warnings_;
}

void RamWatermark::Unreserve(uint64_t size_bytes) {
  MutexLock lock(mu_);
  reserved_bytes_ -= size_bytes;
}

void RamWatermark::Warn(const RamSample& sample, double percent) {
  const absl::Time now = clock_();
  {
    MutexLock lock(mu_);
    ++warnings_;
    if (now - last_warning_ < kWarningInterval) return;
    last_warning_ = now;
  }
  PINION_LOG(kWarning) << absl::StrFormat(
      "pinned memory grows while host RAM is short: %.1f %% of %s are in use, %.1f %% after this "
      "growth (warn_percent is %g; nothing grows above high_percent, %g)",
      sample.percent, HumanBytes(sample.total_bytes), percent, options_.warn_percent,
      options_.high_percent);
}

}  // namespace pinion
