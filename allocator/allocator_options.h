// How a PinnedAllocator behaves. Plain data; the defaults fit most programs.

#ifndef PINION_ALLOCATOR_ALLOCATOR_OPTIONS_H_
#define PINION_ALLOCATOR_ALLOCATOR_OPTIONS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace pinion {

struct AllocatorOptions {
  // --- The budget for the host's RAM ---

  // psutil's percentage, (total - available) / total, above which a rate-limited warning is
  // logged and counted. TRL warns at the same mark. 0 < warn <= high.
  double warn_percent = 60.0;

  // Above this percentage nothing grows any more: requests are served from cached blocks only.
  double high_percent = 90.0;

  // Trimming after the high mark was hit gives cached memory back down to this percentage.
  double low_percent = 85.0;

  // The most that this allocator locks, whatever the host has. 0 is refused; the default is no
  // limit of its own.
  uint64_t max_locked_bytes = UINT64_MAX;

  // --- Performance ---

  // Segments are asked for in chunks of this size, or of the block's size where that is larger.
  // A multiple of the source's granularity.
  uint64_t segment_bytes = uint64_t{64} << 20;

  // How long Allocate waits for released blocks whose tickets are not done yet before it grows.
  absl::Duration max_wait_for_deferred = absl::Milliseconds(0);

  // InvalidArgument that names the field, its value and what it must be.
  absl::Status Validate() const;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_ALLOCATOR_OPTIONS_H_
