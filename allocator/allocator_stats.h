// Statistics of a PinnedAllocator, as a value.

#ifndef PINION_ALLOCATOR_ALLOCATOR_STATS_H_
#define PINION_ALLOCATOR_ALLOCATOR_STATS_H_

#include <cstdint>
#include <string>
#include <vector>

namespace pinion {

// The current bytes, their maximum, and the sum of all that was ever added. With several threads,
// every peak except `locked_bytes` is an upper bound: the sum of each thread's own peak, capped by
// the locked bytes.
struct ByteGauge {
  uint64_t current = 0;
  uint64_t peak = 0;
  uint64_t total = 0;
};

// Blocks whose booked size is at least `from_bytes`, and less than twice `from_bytes`.
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
  uint64_t used_bytes = 0;  // of live and deferred blocks
};

// Calls to a HostMemorySource.
struct SourceStats {
  uint64_t pin_calls = 0;  // calls of HostMemorySource::Allocate, failed ones included
  uint64_t pin_failures = 0;
  double pin_ms = 0;  // wall time of these calls
  double max_pin_ms = 0;
  uint64_t unpin_calls = 0;
  double unpin_ms = 0;
  double max_unpin_ms = 0;
  uint64_t leaked_bytes = 0;  // segments that the source failed to free
};

// Invariants:
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
  ByteGauge used_bytes;       // live and deferred blocks: not available to others
  ByteGauge cached_bytes;     // free inside segments
  ByteGauge locked_bytes;     // segments held from the source; locked in RAM if `pinned`
  ByteGauge pageable_bytes;   // held for pageable_fallback; part of none of the above

  bool pinned = true;  // whether the source's memory is locked in RAM

  uint64_t allocations = 0;  // successful
  uint64_t failures = 0;     // returned an error

  // The steps of Allocate, in the order in which they are tried.
  uint64_t hits = 0;                  // served without asking the source
  uint64_t polled_hits = 0;           // ... after asking the devices for their progress
  uint64_t waits_for_deferred = 0;    // times that Allocate waited for deferred blocks
  uint64_t waited_hits = 0;           // ... and got one
  uint64_t misses = 0;                // had to grow
  uint64_t growth_retries = 0;        // second attempts to grow, after room was made
  uint64_t watermark_refusals = 0;    // growth refused for the host's RAM
  uint64_t limit_refusals = 0;        // ... by max_locked_bytes
  uint64_t source_refusals = 0;       // ... by the source
  uint64_t pageable_allocations = 0;  // served from memory that is not pinned

  uint64_t watermark_warnings = 0;  // growths above warn_percent
  uint64_t growth_waits = 0;        // growths that waited for earlier growths to become visible
  uint64_t trims = 0;               // times that cached segments were freed

  std::vector<SizeBucketStats> size_buckets;  // used ones, by size
  std::vector<NumaNodeStats> numa_nodes;      // nodes with segments

  std::string ToString() const;  // a few readable lines
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_ALLOCATOR_STATS_H_
