#include "pinion/allocator/allocator_stats.h"

#include <sstream>
#include <utility>

#include "pinion/allocator/base/bytes.h"

namespace pinion {
std::string AllocatorStats::ToString() const {
  std::ostringstream out;
  const std::pair<const char*, const ByteGauge&> gauges[] = {
      {"requested", requested_bytes}, {"booked", booked_bytes},
      {"deferred", deferred_bytes},   {"used", used_bytes},
      {"cached", cached_bytes},       {pinned ? "locked" : "held", locked_bytes},
      {"pageable", pageable_bytes}};
  for (const auto& [name, gauge] : gauges) {
    if (gauge.total == 0) continue;
    out << name << ' ' << HumanBytes(gauge.current) << " (peak " << HumanBytes(gauge.peak) << ")  ";
  }
  out << "\nallocations " << allocations << ": hits " << hits << " (after a poll " << polled_hits
      << ", after a wait " << waited_hits << " of " << waits_for_deferred << "), misses " << misses
      << ", pageable " << pageable_allocations << "; failures " << failures << "\npin calls "
      << pin_calls << " (" << pin_failures << " failed, " << pin_ms << " ms, at most " << max_pin_ms
      << ")  unpin calls " << unpin_calls << " (" << unpin_ms << " ms, at most " << max_unpin_ms
      << ")  trims " << trims << "  growth retries " << growth_retries << ", waits " << growth_waits
      << "\nwatermark warnings " << watermark_warnings << "  refusals by the watermark "
      << watermark_refusals << ", the limit " << limit_refusals << ", the source "
      << source_refusals << "  leaked " << HumanBytes(leaked_bytes);
  for (const SizeBucketStats& bucket : size_buckets) {
    out << "\nfrom " << HumanBytes(bucket.from_bytes) << ": " << bucket.allocations
        << " allocations, " << bucket.misses << " misses, booked "
        << HumanBytes(bucket.booked_bytes.current) << " (peak "
        << HumanBytes(bucket.booked_bytes.peak) << ')';
  }
  for (const NumaNodeStats& node : numa_nodes) {
    out << "\nNUMA node " << node.numa_node << ": " << node.segments << " segments, "
        << HumanBytes(node.used_bytes) << " of " << HumanBytes(node.locked_bytes) << " used";
  }
  return out.str();
}

}  // namespace pinion
