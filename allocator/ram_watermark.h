// The policy that keeps pinned memory within the host's RAM: may the allocator grow?
//
//   PINION_ASSIGN_OR_RETURN(RamWatermark::Growth growth, watermark.AdmitGrowth(64 * kMiB));
//   ... pin 64 MiB ...     // `growth` counts them until it is destroyed; then /proc shows them
//
// A growth is judged by what the host looks like *after* it: refused if that is above the high
// mark, or if the growth does not fit the headroom (MemAvailable and every cgroup limit, see
// RamProbe); admitted with a warning if that is above the warn mark. Growths that are admitted and
// not yet visible are counted in, so threads that grow at once do not pass a mark together.
//
// Sampled at growth only. A host whose /proc cannot be read has no marks.
//
// Thread safety: thread-safe; files are read with no lock held.
// Ownership: a Growth refers to its watermark, which outlives it.

#ifndef PINION_ALLOCATOR_RAM_WATERMARK_H_
#define PINION_ALLOCATOR_RAM_WATERMARK_H_

#include <cstdint>
#include <functional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/ram_probe.h"

namespace pinion {

class RamWatermark {
 public:
  // Bytes that may be pinned. Destroy it once they are, or once they will not be.
  class Growth {
   public:
    Growth(Growth&& other) noexcept
        : watermark_(std::exchange(other.watermark_, nullptr)), size_bytes_(other.size_bytes_) {}
    Growth& operator=(Growth&&) = delete;
    ~Growth() {
      if (watermark_ != nullptr) watermark_->Unreserve(size_bytes_);
    }

   private:
    friend class RamWatermark;
    Growth(RamWatermark* watermark, uint64_t size_bytes)
        : watermark_(watermark), size_bytes_(size_bytes) {}

    RamWatermark* watermark_;
    uint64_t size_bytes_;
  };

  // `options` are valid. `clock` is for the rate limit of the warning: one a minute.
  RamWatermark(const AllocatorOptions& options, RamProbe probe,
               std::function<absl::Time()> clock = absl::Now);

  // ResourceExhausted names the mark or limit that was hit, and the numbers.
  absl::StatusOr<Growth> AdmitGrowth(uint64_t size_bytes);

  // What has to be given back before a growth that was refused: down to the low mark, and until
  // the growth fits the headroom.
  uint64_t BytesToGiveBack(uint64_t growth_bytes) const;

  // Growths that were admitted above the warn mark.
  uint64_t warnings() const;

 private:
  void Unreserve(uint64_t size_bytes);
  void Warn(const RamSample& sample, double percent);

  const AllocatorOptions options_;
  const RamProbe probe_;
  const std::function<absl::Time()> clock_;

  mutable Mutex mu_;
  uint64_t reserved_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t warnings_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Time last_warning_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_RAM_WATERMARK_H_
