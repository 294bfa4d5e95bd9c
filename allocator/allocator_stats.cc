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
  if (requested_bytes.current > booked_bytes.current) return broken("requested <= booked");
  if (booked_bytes.current > locked_bytes.current) return broken("booked <= locked");
  if (booked_bytes.current + deferred_bytes.current + cached_bytes.current !=
      locked_bytes.current) {
    return broken("booked + deferred + cached == locked");
  }
  if (hits + misses != allocations) return broken("hits + misses == allocations");
  for (const ByteGauge& gauge :
       {requested_bytes, booked_bytes, deferred_bytes, cached_bytes, locked_bytes}) {
    if (gauge.current > gauge.peak) return broken("current <= peak");
  }
  return absl::OkStatus();
}

std::string AllocatorStats::ToString() const {
  std::ostringstream out;
  const NamedGauge gauges[] = {{"requested", requested_bytes},
                               {"booked", booked_bytes},
                               {"deferred", deferred_bytes},
                               {"cached", cached_bytes},
                               {"locked", locked_bytes}};
  for (const NamedGauge& named : gauges) {
    out << named.name << ' ' << HumanBytes(named.gauge.current) << " (peak "
        << HumanBytes(named.gauge.peak) << ")  ";
  }
  out << "\nallocations " << allocations << " (hits " << hits << ", misses " << misses
      << ")  failures " << failures << "\npin calls " << pin_calls << " (" << pin_failures
      << " failed, " << pin_ms << " ms)  unpin calls " << unpin_calls << "\nwaits for deferred "
      << waits_for_deferred << "  watermark warnings " << watermark_warnings << ", refusals "
      << watermark_refusals << "  limit refusals " << limit_refusals << "  trims " << trims
      << "  leaked " << HumanBytes(leaked_bytes);
  return out.str();
}

}  // namespace pinion
