// Compares a planned step's modelled time with and without recording. Recording costs two events
// per save and read, and the host's calls.
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
  double recorded_us = 0;  // planned and recorded; reads the last record
  double planned_us = 0;   // planned
  double alone_us = 0;     // without offload
};

// `step` replayed within `target_bytes`. Internal where a step was recorded that should not have
// been, or the other way round.
absl::StatusOr<RecordedReplay> ReplayRecorded(const StepTrace& step, uint64_t target_bytes,
                                              const MethodWorld& world);

}  // namespace pinion

#endif  // PINION_BENCH_OFFLOAD_RECORDED_REPLAY_H_
