#include "pinion/allocator/ram/ram_watermark.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"

namespace pinion {
namespace {

constexpr absl::Duration kWarningInterval = absl::Minutes(1);
constexpr absl::Duration kLookAgainAfter = absl::Milliseconds(1);

uint64_t UsedBytes(const RamSample& sample) { return sample.total_bytes - sample.available_bytes; }

// Returns the percentage in use after `taken_bytes` more. NaN, which is above no watermark,
// if the host's memory is unknown.
double PercentAfter(const RamSample& sample, uint64_t taken_bytes) {
  const uint64_t available = sample.available_bytes - std::min(sample.available_bytes, taken_bytes);
  return 100.0 * static_cast<double>(sample.total_bytes - available) /
         static_cast<double>(sample.total_bytes);
}

// Returns the bytes to free until `used_bytes` are at most `percent` of the host.
uint64_t BytesAbove(double percent, const RamSample& sample, uint64_t used_bytes) {
  if (sample.total_bytes == 0) return 0;
  const double allowed = percent / 100.0 * static_cast<double>(sample.total_bytes);
  const double above = static_cast<double>(used_bytes) - allowed;
  return above > 0 ? static_cast<uint64_t>(above) + 1 : 0;
}

RamLevel NextLevel(const AllocatorOptions& options, RamLevel level, double percent) {
  const double hysteresis = options.high_percent - options.low_percent;
  // A warn_percent below the hysteresis must still be left.
  const double warn_end = std::max(options.warn_percent - hysteresis, options.warn_percent / 2);
  const auto above = [&](RamLevel which, double mark, double end) {
    return percent > (level >= which ? end : mark);
  };
  if (above(RamLevel::kHigh, options.high_percent, options.low_percent)) return RamLevel::kHigh;
  if (above(RamLevel::kWarn, options.warn_percent, warn_end)) return RamLevel::kWarn;
  return RamLevel::kNormal;
}

}  // namespace

RamWatermark::RamWatermark(const AllocatorOptions& options, HostRam ram, MonotonicClock clock)
    : options_(options), ram_(std::move(ram)), clock_(std::move(clock)) {
  PINION_CHECK(clock_ != nullptr) << "RamWatermark: the clock is null; pass NewStopwatch()";
}

absl::StatusOr<RamWatermark::Growth> RamWatermark::AdmitGrowth(uint64_t size_bytes,
                                                               absl::Duration& wait_left) {
  // A reservation of a growth that is never admitted would hold up other processes.
  PINION_RETURN_IF_ERROR(CheckGrowth(size_bytes));
  Growth growth = ram_.ledger.Reserve(size_bytes);
  bool has_waited = false;
  absl::Duration last_look = clock_();
  while (true) {
    // Before the sample: memory that is committed in between counts twice rather than never.
    const uint64_t pending_bytes = growth.BytesAhead();
    const Observation now = SampleLevel();
    absl::Status refused = Judge(now, size_bytes, pending_bytes);
    if (refused.ok()) {
      const double percent = PercentAfter(now.sample, size_bytes + pending_bytes);
      if (percent > options_.warn_percent) Warn(now.sample, percent);
      return growth;
    }
    const bool may_wait = wait_left > absl::ZeroDuration();
    if (!may_wait || pending_bytes == 0 || !Judge(now, size_bytes, 0).ok()) return refused;
    if (!std::exchange(has_waited, true)) {
      MutexLock lock(mu_);
      ++counts_.waits;
    }
    absl::SleepFor(kLookAgainAfter);
    const absl::Duration time = clock_();
    wait_left -= time - last_look;
    last_look = time;
  }
}

absl::Status RamWatermark::Judge(const Observation& now, uint64_t size_bytes,
                                 uint64_t pending_bytes) const {
  const RamSample& sample = now.sample;
  const uint64_t taken_bytes = size_bytes + pending_bytes;
  const double percent = PercentAfter(sample, taken_bytes);
  std::string numbers = absl::StrFormat("to take %s more, with %s of %s in use (%.1f %%)",
                                        HumanBytes(size_bytes), HumanBytes(UsedBytes(sample)),
                                        HumanBytes(sample.total_bytes), sample.percent);
  if (pending_bytes != 0) {
    absl::StrAppend(&numbers, " and ", HumanBytes(pending_bytes), " about to be taken");
  }
  if (percent > options_.high_percent) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%s, would put the host's RAM at %.1f %%, above high_percent (%g): free some of it, or "
        "raise high_percent",
        numbers, percent, options_.high_percent));
  }
  if (now.level == RamLevel::kHigh) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("%s, has to wait: the host was above high_percent (%g) and is not down to "
                        "low_percent (%g): free some of its RAM, or raise both",
                        numbers, options_.high_percent, options_.low_percent));
  }
  if (taken_bytes > sample.headroom_bytes) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%s, does not fit the %s that %s leaves: free some of it, or raise that limit", numbers,
        HumanBytes(sample.headroom_bytes), sample.limited_by));
  }
  return absl::OkStatus();
}

uint64_t RamWatermark::BytesToGiveBack(uint64_t growth_bytes) {
  const uint64_t taken_bytes = ram_.ledger.reserved_bytes() + growth_bytes;
  const Observation now = SampleLevel();
  const RamSample& sample = now.sample;
  uint64_t bytes = BytesAbove(options_.high_percent, sample, UsedBytes(sample) + taken_bytes);
  if (now.level == RamLevel::kHigh) {
    bytes = std::max(bytes, BytesAbove(options_.low_percent, sample, UsedBytes(sample)));
  }
  if (taken_bytes > sample.headroom_bytes) {
    bytes = std::max(bytes, taken_bytes - sample.headroom_bytes);
  }
  return bytes;
}

RamLevel RamWatermark::level() const {
  MutexLock lock(mu_);
  return level_;
}

RamWatermark::Counts RamWatermark::counts() const {
  MutexLock lock(mu_);
  return counts_;
}

RamWatermark::Observation RamWatermark::SampleLevel() {
  Observation now{.sample = ram_.probe.Sample(options_.high_percent), .level = RamLevel::kNormal};
  const double percent = PercentAfter(now.sample, 0);
  RamLevelChange change;
  {
    MutexLock lock(mu_);
    change.from = level_;
    level_ = NextLevel(options_, level_, percent);
    change.to = now.level = level_;
  }
  if (change.from != change.to && options_.on_ram_level) {
    change.percent = now.sample.percent;
    change.headroom_bytes = now.sample.headroom_bytes;
    options_.on_ram_level(change);
  }
  return now;
}

void RamWatermark::Warn(const RamSample& sample, double percent) {
  const absl::Duration now = clock_();
  {
    MutexLock lock(mu_);
    ++counts_.warnings;
    if (now - last_warning_ < kWarningInterval) return;
    last_warning_ = now;
  }
  PINION_LOG(kWarning) << absl::StrFormat(
      "host memory is taken while RAM is short: %.1f %% of %s are in use, %.1f %% after this "
      "growth (warn_percent is %g; nothing grows above high_percent, %g)",
      sample.percent, HumanBytes(sample.total_bytes), percent, options_.warn_percent,
      options_.high_percent);
}

}  // namespace pinion
