// What a PinnedAllocator did, as a value.

#ifndef PINION_ALLOCATOR_ALLOCATOR_STATS_H_
#define PINION_ALLOCATOR_ALLOCATOR_STATS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace pinion {

// Bytes now, and the most they ever were.
struct ByteGauge {
  uint64_t current = 0;
  uint64_t peak = 0;
};

// Invariants (CheckInvariants):
//   requested <= booked <= locked      booked + deferred + cached == locked (current values)
//   hits + misses == allocations       current <= peak for every gauge
struct AllocatorStats {
  ByteGauge requested_bytes;  // as asked for, of live blocks
  ByteGauge booked_bytes;     // as rounded, of live blocks
  ByteGauge deferred_bytes;   // released, waiting for tickets
  ByteGauge cached_bytes;     // free inside segments
  ByteGauge locked_bytes;     // segments held from the source

  uint64_t allocations = 0;  // successful
  uint64_t hits = 0;         // served without asking the source
  uint64_t misses = 0;       // had to grow
  uint64_t failures = 0;     // returned an error

  uint64_t pin_calls = 0;  // calls of HostMemorySource::Allocate, failed ones included
  uint64_t pin_failures = 0;
  double pin_ms = 0;  // wall time inside them
  uint64_t unpin_calls = 0;

  uint64_t waits_for_deferred = 0;  // the degrade order, step by step
  uint64_t watermark_warnings = 0;
  uint64_t watermark_refusals = 0;
  uint64_t limit_refusals = 0;  // max_locked_bytes
  uint64_t trims = 0;
  uint64_t leaked_bytes = 0;  // segments that the source failed to free

  absl::Status CheckInvariants() const;
  std::string ToString() const;  // a few lines for people
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_ALLOCATOR_STATS_H_
