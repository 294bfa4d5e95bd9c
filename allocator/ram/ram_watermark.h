// Decides whether an allocator may grow within the host's RAM.
//
//   PINION_ASSIGN_OR_RETURN(RamWatermark::Growth growth, watermark.AdmitGrowth(64 * kMiB));
//   ... pin 64 MiB ...     // counted in the ledger until `growth` is destroyed; from then on the
//                          // kernel's numbers show it
//
// A growth is judged by the state *after* it, with all earlier reservations of this and other
// processes (HostLedger). It is refused above high_percent, and if it does not fit the headroom.
// The headroom comes from MemAvailable, and from high_percent of cgroup limits and NUMA nodes
// (RamProbe). Above warn_percent it is admitted with a warning.
//
// If only reservations are in the way, some of them may already be in the kernel's numbers and
// count twice. The growth then waits for them to end.
//
//   percent  0 ------------- warn ------- low --- high ------ 100
//   level      kNormal        | kWarn              | kHigh
//                      <------|            <-------|          left only (high - low) points lower
//                                                             (warn: at half of it at the latest)
//
// At level kHigh nothing grows. The host is sampled by growths and by Observe only. A host whose
// /proc cannot be read has no watermarks.
//
// Thread safety: thread-safe. Files are read, and AllocatorOptions::on_ram_level is called, without
// a lock. An exception of on_ram_level passes through the call, which then has reserved nothing.
// Ownership: a Growth is a value.

#ifndef PINION_ALLOCATOR_RAM_RAM_WATERMARK_H_
#define PINION_ALLOCATOR_RAM_RAM_WATERMARK_H_

#include <cstdint>
#include <functional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/deadline.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/ram/host_ledger.h"
#include "pinion/allocator/ram/host_ram.h"
#include "pinion/allocator/ram/ram_probe.h"

namespace pinion {

class RamWatermark {
 public:
  // Bytes that may be pinned. Destroy it after pinning, or if nothing will be pinned.
  using Growth = HostLedger::Reservation;

  static constexpr absl::Duration kLongestWait = absl::Milliseconds(100);

  struct Counts {
    uint64_t warnings = 0;  // growths admitted above warn_percent
    uint64_t waits = 0;     // growths that waited for earlier reservations
  };

  // Returns the time since a fixed moment. Setting the system's time must not change it.
  using MonotonicClock = std::function<absl::Duration()>;
  static MonotonicClock NewStopwatch() {
    return [stopwatch = internal::Stopwatch()] { return stopwatch.Elapsed(); };
  }

  // `options` must be valid. `clock` serves the warning's rate limit (one a minute) and the end of
  // waits.
  RamWatermark(const AllocatorOptions& options, HostRam ram, MonotonicClock clock = NewStopwatch());

  // Returns ResourceExhausted with the watermark or limit and the numbers. Waits up to `wait_left`
  // if only reservations of others are in the way, and subtracts the time that it took. So several
  // growths of one request share a wait.
  absl::StatusOr<Growth> AdmitGrowth(uint64_t size_bytes, absl::Duration& wait_left);

  // Waits up to kLongestWait.
  absl::StatusOr<Growth> AdmitGrowth(uint64_t size_bytes) {
    absl::Duration wait_left = kLongestWait;
    return AdmitGrowth(size_bytes, wait_left);
  }

  // Returns AdmitGrowth's error for a growth that does not fit even without reservations. Reserves
  // nothing.
  absl::Status CheckGrowth(uint64_t size_bytes) {
    return Judge(SampleLevel(), size_bytes, /*pending_bytes=*/0);
  }

  // Returns the bytes to free before a refused growth fits. At level kHigh, also enough to reach
  // low_percent.
  uint64_t BytesToGiveBack(uint64_t growth_bytes);

  // Returns the level of the last sample.
  RamLevel level() const;

  // Samples the host, and calls on_ram_level if the level has changed.
  void Observe() { (void)SampleLevel(); }

  Counts counts() const;

 private:
  struct Observation {
    RamSample sample;
    RamLevel level;
  };

  Observation SampleLevel();
  // Returns why `size_bytes` may not be taken in addition to `pending_bytes`, or OK.
  absl::Status Judge(const Observation& now, uint64_t size_bytes, uint64_t pending_bytes) const;
  void Warn(const RamSample& sample, double percent);

  const AllocatorOptions options_;
  const HostRam ram_;
  const MonotonicClock clock_;

  mutable Mutex mu_;
  Counts counts_ ABSL_GUARDED_BY(mu_);
  RamLevel level_ ABSL_GUARDED_BY(mu_) = RamLevel::kNormal;
  absl::Duration last_warning_ ABSL_GUARDED_BY(mu_) = -absl::InfiniteDuration();  // by clock_
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_RAM_RAM_WATERMARK_H_
