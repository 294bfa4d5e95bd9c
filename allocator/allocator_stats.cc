#include "pinion/allocator/allocator_stats.h"

#include <sstream>

#include "pinion/allocator/base/bytes.h"

namespace pinion {
namespace {

struct NamedGauge {
  const char* name;
  const ByteGauge& gauge;
};

}  // namespace

absl::Status AllocatorStats::CheckInvariants() const {
  const auto broken = [this](const char* invariant) {
    return absl::InternalError(std::string("allocator statistics: not ") + invariant + "\n" +
                               ToString());
  };
  for (const auto member : {&ByteGauge::current, &ByteGauge::peak}) {
    if (requested_bytes.*member > booked_bytes.*member) return broken("requested <= booked");
    if (booked_bytes.*member > used_bytes.*member) return broken("booked <= used");
    if (used_bytes.*member > locked_bytes.*member) return broken("used <= locked");
  }
  if (booked_bytes.current + deferred_bytes.current != used_bytes.current) {
    return broken("booked + deferred == used");
  }
  if (used_bytes.current + cached_bytes.current != locked_bytes.current) {
    return broken("used + cached == locked");
  }
  if (hits + misses + pageable_allocations != allocations) {
    return broken("hits + misses + pageable_allocations == allocations");
  }
  if (polled_hits + waited_hits > hits) return broken("polled_hits + waited_hits <= hits");
  if (waited_hits > waits_for_deferred) return broken("waited_hits <= waits_for_deferred");
  if (pin_failures > pin_calls) return broken("pin_failures <= pin_calls");
  for (const ByteGauge& gauge : {requested_bytes, booked_bytes, deferred_bytes, used_bytes,
                                 cached_bytes, locked_bytes, pageable_bytes}) {
    if (gauge.current > gauge.peak) return broken("current <= peak");
    if (gauge.peak > gauge.total) return broken("peak <= total");
  }
  uint64_t allocations_of_buckets = 0;
  uint64_t booked_of_buckets = 0;
  for (const SizeBucketStats& bucket : size_buckets) {
    allocations_of_buckets += bucket.allocations;
    booked_of_buckets += bucket.booked_bytes.current;
  }
  if (allocations_of_buckets != hits + misses || booked_of_buckets != booked_bytes.current) {
    return broken("the sum of its size buckets");
  }
  uint64_t locked_of_nodes = 0;
  uint64_t used_of_nodes = 0;
  for (const NumaNodeStats& node : numa_nodes) {
    locked_of_nodes += node.locked_bytes;
    used_of_nodes += node.used_bytes;
  }
  if (locked_of_nodes != locked_bytes.current || used_of_nodes != used_bytes.current) {
    return broken("the sum of its NUMA nodes");
  }
  return absl::OkStatus();
}

std::string AllocatorStats::ToString() const {
  std::ostringstream out;
  const NamedGauge gauges[] = {
      {"requested", requested_bytes}, {"booked", booked_bytes},
      {"deferred", deferred_bytes},   {"used", used_bytes},
      {"cached", cached_bytes},       {pinned ? "locked" : "held", locked_bytes},
      {"pageable", pageable_bytes}};
  for (const NamedGauge& named : gauges) {
    if (named.gauge.total == 0) continue;
    out << named.name << ' ' << HumanBytes(named.gauge.current) << " (peak "
        << HumanBytes(named.gauge.peak) << ")  ";
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
