#include "pinion/allocator/pool/stats_sum.h"

#include <algorithm>
#include <cstdint>

namespace pinion::internal {
namespace {

void Add(ByteGauge* sum, const ByteGauge& gauge) {
  sum->current += gauge.current;
  sum->peak += gauge.peak;
  sum->total += gauge.total;
}

}  // namespace

void AddStats(const AllocatorStats& stats, AllocatorStats* sum) {
  Add(&sum->requested_bytes, stats.requested_bytes);
  Add(&sum->booked_bytes, stats.booked_bytes);
  Add(&sum->deferred_bytes, stats.deferred_bytes);
  Add(&sum->used_bytes, stats.used_bytes);
  Add(&sum->cached_bytes, stats.cached_bytes);
  sum->allocations += stats.allocations;
  sum->hits += stats.hits;
  sum->misses += stats.misses;
  for (const SizeBucketStats& bucket : stats.size_buckets) {
    auto place = std::lower_bound(
        sum->size_buckets.begin(), sum->size_buckets.end(), bucket.from_bytes,
        [](const SizeBucketStats& other, uint64_t bytes) { return other.from_bytes < bytes; });
    if (place == sum->size_buckets.end() || place->from_bytes != bucket.from_bytes) {
      place = sum->size_buckets.emplace(place);
      place->from_bytes = bucket.from_bytes;
    }
    place->allocations += bucket.allocations;
    place->misses += bucket.misses;
    Add(&place->booked_bytes, bucket.booked_bytes);
  }
  for (const NumaNodeStats& node : stats.numa_nodes) {
    for (NumaNodeStats& mine : sum->numa_nodes) {
      if (mine.numa_node == node.numa_node) mine.used_bytes += node.used_bytes;
    }
  }
}

void BoundPeaks(AllocatorStats* sum) {
  for (ByteGauge* gauge : {&sum->requested_bytes, &sum->booked_bytes, &sum->deferred_bytes,
                           &sum->used_bytes, &sum->cached_bytes}) {
    gauge->peak = std::min({gauge->peak, gauge->total, sum->locked_bytes.peak});
  }
}

}  // namespace pinion::internal
