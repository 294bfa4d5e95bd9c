// Transfer counts, bytes, waits and times of a TransferEngine. Plain data.
//
//   const DirectionStats out = engine->GetStats().d2h;
//   EXPECT_EQ(out.submitted_bytes, out.completed_bytes + out.in_flight_bytes);

#ifndef PINION_ENGINE_STATS_ENGINE_STATS_H_
#define PINION_ENGINE_STATS_ENGINE_STATS_H_

#include <cstdint>
#include <string>

#include "pinion/engine/stats/duration_histogram.h"

namespace pinion {

// Invariants: submitted_bytes == completed_bytes + in_flight_bytes; completed_transfers <=
// submitted_transfers <= submitted_chunks. A batch that failed half-way counts by its chunks alone.
struct DirectionStats {
  uint64_t submitted_transfers = 0;
  uint64_t submitted_chunks = 0;  // one per transfer; several for a large one
  uint64_t submitted_pieces = 0;  // as sent to the device, after merging neighbours
  uint64_t submitted_bytes = 0;
  uint64_t completed_transfers = 0;  // as of the last poll
  uint64_t completed_bytes = 0;
  uint64_t in_flight_bytes = 0;
  uint64_t peak_in_flight_bytes = 0;
  uint64_t flow_control_waits = 0;  // times that Submit blocked the host; copies to the device only
  uint64_t failed_submits = 0;      // Submit calls that returned an error

  // With EngineOptions::time_transfers, as of the last poll.
  DurationSummary copy_time;   // of chunks, on the device
  DurationSummary stall_time;  // of streams, waiting for this direction's transfers
  uint64_t untimed = 0;        // chunks and waits whose events could not be recorded or read
};

struct EngineStats {
  DirectionStats h2d;
  DirectionStats d2h;
  uint64_t event_waits = 0;          // enqueued stream waits
  uint64_t event_waits_skipped = 0;  // skipped stream waits: the work was known to be done
  uint64_t transient_retries = 0;    // device calls repeated after a transient error

  std::string ToString() const;
};

}  // namespace pinion

#endif  // PINION_ENGINE_STATS_ENGINE_STATS_H_
