// What a TransferEngine did, as a value. Plain data.
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
// submitted_transfers <= submitted_chunks. Chunks of a batch that failed half way count, the batch
// does not.
struct DirectionStats {
  uint64_t submitted_transfers = 0;
  uint64_t submitted_chunks = 0;  // one per transfer, more where it was larger than half the window
  uint64_t submitted_pieces = 0;  // as the device got them: neighbours merged
  uint64_t submitted_bytes = 0;
  uint64_t completed_transfers = 0;  // as far as polling knows
  uint64_t completed_bytes = 0;
  uint64_t in_flight_bytes = 0;
  uint64_t peak_in_flight_bytes = 0;
  uint64_t flow_control_waits = 0;  // Submit blocked the host; copies to the device only
  uint64_t failed_submits = 0;      // returned an error

  // With EngineOptions::time_transfers, as far as polling knows.
  DurationSummary copy_time;   // of chunks, on the device
  DurationSummary stall_time;  // of streams, at waits for transfers of this direction
  uint64_t untimed = 0;        // chunks and waits whose events could not be recorded or read
};

struct EngineStats {
  DirectionStats h2d;
  DirectionStats d2h;
  uint64_t event_waits = 0;          // stream waits that were enqueued
  uint64_t event_waits_skipped = 0;  // not needed: known to be done
  uint64_t transient_retries = 0;    // device calls made again after they had failed for the moment

  std::string ToString() const;
};

}  // namespace pinion

#endif  // PINION_ENGINE_STATS_ENGINE_STATS_H_
