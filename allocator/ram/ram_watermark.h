// The policy that keeps pinned memory within the host's RAM: may the allocator grow?
//
//   PINION_ASSIGN_OR_RETURN(RamWatermark::Growth growth, watermark.AdmitGrowth(64 * kMiB));
//   ... pin 64 MiB ...     // the host's ledger counts them until `growth` is destroyed; then the
//                          // kernel's numbers show them
//
// A growth is judged by what the host looks like *after* it: refused if that is above the high
// mark, or if the growth does not fit the headroom (MemAvailable, and the same percentage of each
// cgroup limit and of the NUMA nodes in reach, see RamProbe); admitted with a warning if that is
// above the warn mark. What this and other processes reserved before it (HostLedger) is counted in,
// so nobody passes a mark together with others. Where only that stands in the way, part of it may
// be in the kernel's numbers already, and count twice: the growth waits, up to kLongestWait, until
// what is reserved has become visible or was given up.
//
//   percent  0 ------------- warn ------- low --- high ------ 100
//   level      kNormal        | kWarn              | kHigh
//                      <------|            <-------|          left only (high - low) points lower
//                                                             (warn: at half its mark, if not yet)
//
// At level kHigh nothing grows, whatever its size.
//
// Sampled at growth and by Observe only. A host whose /proc cannot be read has no marks.
//
// Thread safety: thread-safe; files are read, and AllocatorOptions::on_ram_level is called, with no
// lock held. What that throws passes through the call, which then has reserved nothing.
// Ownership: a Growth is a value.

#ifndef PINION_ALLOCATOR_RAM_RAM_WATERMARK_H_
#define PINION_ALLOCATOR_RAM_RAM_WATERMARK_H_

#include <cstdint>
#include <functional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/ram/host_ledger.h"
#include "pinion/allocator/ram/host_ram.h"
#include "pinion/allocator/ram/ram_probe.h"

namespace pinion {

class RamWatermark {
 public:
  // Bytes that may be pinned. Destroy it once they are, or once they will not be.
  using Growth = HostLedger::Reservation;

  static constexpr absl::Duration kLongestWait = absl::Milliseconds(100);

  struct Counts {
    uint64_t warnings = 0;  // growths that were admitted above the warn mark
    uint64_t waits = 0;     // growths that waited for what was reserved before them
  };

  // `options` are valid. `clock` is for the rate limit of the warning, one a minute, and for the
  // end of the wait.
  RamWatermark(const AllocatorOptions& options, HostRam ram,
               std::function<absl::Time()> clock = absl::Now);

  // Whether to wait, up to kLongestWait, where only what other processes are about to pin is in the
  // way: they may fail to.
  enum class Wait { kForOthers, kNo };

  // ResourceExhausted names the mark or limit that was hit, and the numbers.
  absl::StatusOr<Growth> AdmitGrowth(uint64_t size_bytes, Wait wait = Wait::kForOthers);

  // AdmitGrowth's error for a growth that has no room even without what others reserved. Reserves
  // nothing.
  absl::Status CheckGrowth(uint64_t size_bytes) {
    return Judge(SampleLevel(), size_bytes, /*pending_bytes=*/0);
  }

  // What has to be given back before a growth that was refused: until it fits below the high mark
  // and into the headroom; at level kHigh, down to the low mark at least.
  uint64_t BytesToGiveBack(uint64_t growth_bytes);

  // As it was when the host was sampled last.
  RamLevel level() const;

  // Samples the host, and tells on_ram_level if that is another level than before.
  void Observe() { (void)SampleLevel(); }

  Counts counts() const;

 private:
  struct Observation {
    RamSample sample;
    RamLevel level;
  };

  Observation SampleLevel();
  // Why `size_bytes` may not be taken on top of `pending_bytes`; OK if they may.
  absl::Status Judge(const Observation& now, uint64_t size_bytes, uint64_t pending_bytes) const;
  void Warn(const RamSample& sample, double percent);

  const AllocatorOptions options_;
  const HostRam ram_;  // with a ledger
  const std::function<absl::Time()> clock_;

  mutable Mutex mu_;
  Counts counts_ ABSL_GUARDED_BY(mu_);
  RamLevel level_ ABSL_GUARDED_BY(mu_) = RamLevel::kNormal;
  absl::Time last_warning_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_RAM_RAM_WATERMARK_H_
