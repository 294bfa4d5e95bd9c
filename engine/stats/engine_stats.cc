#include "pinion/engine/stats/engine_stats.h"

#include <sstream>

#include "pinion/allocator/base/bytes.h"

namespace pinion {
namespace {

void Print(std::ostream& out, const char* name, const DirectionStats& stats) {
  out << name << ": " << stats.submitted_transfers << " transfers ("
      << HumanBytes(stats.submitted_bytes) << " in " << stats.submitted_pieces << " pieces and "
      << stats.submitted_chunks << " chunks), " << stats.completed_transfers << " completed, "
      << HumanBytes(stats.in_flight_bytes) << " in flight (peak "
      << HumanBytes(stats.peak_in_flight_bytes) << "), " << stats.flow_control_waits
      << " flow control waits, " << stats.failed_submits << " failed submits\n";
  if (stats.copy_time.count + stats.stall_time.count + stats.untimed == 0) return;
  out << "  copies " << stats.copy_time.ToString() << "\n  stalls " << stats.stall_time.ToString()
      << "; " << stats.untimed << " not timed\n";
}

}  // namespace

std::string EngineStats::ToString() const {
  std::ostringstream out;
  Print(out, "D2H", d2h);
  Print(out, "H2D", h2d);
  out << "event waits: " << event_waits << " enqueued, " << event_waits_skipped << " not needed\n"
      << "transient retries: " << transient_retries << "\n";
  return out.str();
}

}  // namespace pinion
