// What recording a step that runs as planned does to its time on the emulated device: modelled, so
// that two events for each save and read, and the host's calls for them, are all that counts.
//
// Thread safety: none: each run registers an emulated machine of its own as "emu".

#ifndef PINION_BENCH_OFFLOAD_RECORDED_REPLAY_H_
#define PINION_BENCH_OFFLOAD_RECORDED_REPLAY_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "pinion/bench/offload/offload_method.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

// Modelled times of the same step.
struct RecordedReplay {
  double recorded_us = 0;  // as planned, and recorded; the record before it is read at its begin
  double planned_us = 0;   // as planned
  double alone_us = 0;     // without offload
};

// `step` replayed within `target_bytes`. Internal where a step was recorded that should not have
// been, or the other way round.
absl::StatusOr<RecordedReplay> ReplayRecorded(const StepTrace& step, uint64_t target_bytes,
                                              const MethodWorld& world);

}  // namespace pinion

#endif  // PINION_BENCH_OFFLOAD_RECORDED_REPLAY_H_
