// What a PinnedAllocator did, as a value.

#ifndef PINION_ALLOCATOR_ALLOCATOR_STATS_H_
#define PINION_ALLOCATOR_ALLOCATOR_STATS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace pinion {

// Bytes now, the most they ever were, and all that was ever added. Where several threads allocate,
// the peak of all but `locked_bytes` is a bound: the sum of what each thread's memory had at most,
// at whatever time, and no more than was locked.
struct ByteGauge {
  uint64_t current = 0;
  uint64_t peak = 0;
  uint64_t total = 0;
};

// Blocks whose booked size is at least `from_bytes`, and less than twice that.
struct SizeBucketStats {
  uint64_t from_bytes = 0;
  uint64_t allocations = 0;
  uint64_t misses = 0;
  ByteGauge booked_bytes;  // of live blocks
};

struct NumaNodeStats {
  int numa_node = -1;  // -1: unknown or spread
  uint64_t segments = 0;
  uint64_t locked_bytes = 0;
  uint64_t used_bytes = 0;  // of blocks that are live or deferred
};

// Calls to a HostMemorySource.
struct SourceStats {
  uint64_t pin_calls = 0;  // calls of HostMemorySource::Allocate, failed ones included
  uint64_t pin_failures = 0;
  double pin_ms = 0;  // wall time inside them
  double max_pin_ms = 0;
  uint64_t unpin_calls = 0;
  double unpin_ms = 0;
  double max_unpin_ms = 0;
  uint64_t leaked_bytes = 0;  // segments that the source failed to free
};

// Invariants (CheckInvariants):
//   requested <= booked <= used <= locked        (current values; peaks as well)
//   booked + deferred == used      used + cached == locked         (current values)
//   hits + misses + pageable_allocations == allocations
//   polled_hits + waited_hits <= hits      waited_hits <= waits_for_deferred
//   pin_failures <= pin_calls
//   current <= peak <= total for every gauge
//   size buckets: sums of allocations and booked == hits + misses, booked
//   NUMA nodes: sums of locked and used == locked, used
struct AllocatorStats : SourceStats {
  ByteGauge requested_bytes;  // as asked for, of live blocks
  ByteGauge booked_bytes;     // as rounded, of live blocks
  ByteGauge deferred_bytes;   // released, waiting for tickets
  ByteGauge used_bytes;       // of live and deferred blocks: what nobody else can have
  ByteGauge cached_bytes;     // free inside segments
  ByteGauge locked_bytes;     // segments held from the source; locked in RAM if `pinned`
  ByteGauge pageable_bytes;   // held for pageable_fallback, in none of the above

  bool pinned = true;  // whether the source's memory is

  uint64_t allocations = 0;  // successful
  uint64_t failures = 0;     // returned an error

  // The degrade order, step by step.
  uint64_t hits = 0;                  // served without asking the source
  uint64_t polled_hits = 0;           // ... after the devices were asked how far they are
  uint64_t waits_for_deferred = 0;    // times that Allocate waited for released blocks
  uint64_t waited_hits = 0;           // ... and got one
  uint64_t misses = 0;                // had to grow
  uint64_t growth_retries = 0;        // second attempts to grow, after room was made
  uint64_t watermark_refusals = 0;    // growth refused for the host's RAM
  uint64_t limit_refusals = 0;        // ... by max_locked_bytes
  uint64_t source_refusals = 0;       // ... by the source
  uint64_t pageable_allocations = 0;  // served from memory that is not pinned

  uint64_t watermark_warnings = 0;  // growths above the warn mark
  uint64_t growth_waits = 0;  // growths that waited for others, admitted before, to become visible
  uint64_t trims = 0;         // times that cached segments went back

  std::vector<SizeBucketStats> size_buckets;  // those that were ever used, by size
  std::vector<NumaNodeStats> numa_nodes;      // those that segments lie on, by node

  absl::Status CheckInvariants() const;
  std::string ToString() const;  // a few lines for people
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_ALLOCATOR_STATS_H_
