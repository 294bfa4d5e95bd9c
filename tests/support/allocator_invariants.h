// Checks what allocator_stats.h says of every AllocatorStats.
//
//   EXPECT_THAT(CheckInvariants(allocator->GetStats()), IsOk());

#ifndef PINION_TESTS_SUPPORT_ALLOCATOR_INVARIANTS_H_
#define PINION_TESTS_SUPPORT_ALLOCATOR_INVARIANTS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "pinion/allocator/allocator_stats.h"

namespace pinion::testing {

// Returns InternalError with the first invariant that does not hold.
inline absl::Status CheckInvariants(const AllocatorStats& stats) {
  const auto broken = [&](const char* invariant) {
    return absl::InternalError(std::string("allocator statistics: not ") + invariant + "\n" +
                               stats.ToString());
  };
  for (const auto member : {&ByteGauge::current, &ByteGauge::peak}) {
    if (stats.requested_bytes.*member > stats.booked_bytes.*member)
      return broken("requested <= booked");
    if (stats.booked_bytes.*member > stats.used_bytes.*member) return broken("booked <= used");
    if (stats.used_bytes.*member > stats.locked_bytes.*member) return broken("used <= locked");
  }
  if (stats.booked_bytes.current + stats.deferred_bytes.current != stats.used_bytes.current) {
    return broken("booked + deferred == used");
  }
  if (stats.used_bytes.current + stats.cached_bytes.current != stats.locked_bytes.current) {
    return broken("used + cached == locked");
  }
  if (stats.hits + stats.misses + stats.pageable_allocations != stats.allocations) {
    return broken("hits + misses + pageable_allocations == allocations");
  }
  if (stats.polled_hits + stats.waited_hits > stats.hits)
    return broken("polled_hits + waited_hits <= hits");
  if (stats.waited_hits > stats.waits_for_deferred)
    return broken("waited_hits <= waits_for_deferred");
  if (stats.pin_failures > stats.pin_calls) return broken("pin_failures <= pin_calls");
  for (const ByteGauge& gauge :
       {stats.requested_bytes, stats.booked_bytes, stats.deferred_bytes, stats.used_bytes,
        stats.cached_bytes, stats.locked_bytes, stats.pageable_bytes}) {
    if (gauge.current > gauge.peak) return broken("current <= peak");
    if (gauge.peak > gauge.total) return broken("peak <= total");
  }
  uint64_t allocations_of_buckets = 0;
  uint64_t booked_of_buckets = 0;
  for (const SizeBucketStats& bucket : stats.size_buckets) {
    allocations_of_buckets += bucket.allocations;
    booked_of_buckets += bucket.booked_bytes.current;
  }
  if (allocations_of_buckets != stats.hits + stats.misses ||
      booked_of_buckets != stats.booked_bytes.current) {
    return broken("the sum of its size buckets");
  }
  uint64_t locked_of_nodes = 0;
  uint64_t used_of_nodes = 0;
  for (const NumaNodeStats& node : stats.numa_nodes) {
    locked_of_nodes += node.locked_bytes;
    used_of_nodes += node.used_bytes;
  }
  if (locked_of_nodes != stats.locked_bytes.current || used_of_nodes != stats.used_bytes.current) {
    return broken("the sum of its NUMA nodes");
  }
  return absl::OkStatus();
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_ALLOCATOR_INVARIANTS_H_
