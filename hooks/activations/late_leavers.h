// Saved tensors that were to stay on the device, and leave after all: others had to go first, or
// the step is another one than was thought.

#ifndef PINION_HOOKS_ACTIVATIONS_LATE_LEAVERS_H_
#define PINION_HOOKS_ACTIVATIONS_LATE_LEAVERS_H_

#include <c10/core/Device.h>

#include "absl/base/thread_annotations.h"
#include "pinion/hooks/activations/offload_state.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/activations/storage_record.h"
#include "pinion/hooks/activations/tensor_departures.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {

// Those that the schedule names now go to `due`, behind what is in it, or to those that are pending
// while their operators may still run, and what is cast again lets go of its memory. `node` is the
// last one that has saved something.
void TakeLateLeavers(OffloadState& state, OffloadStatsRecorder& stats, const NodeId& node,
                     RecordPtrs& due, Released& released)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mu, kRecordsLock);

// Evicts until the step keeps within its target, or nothing more can be evicted.
void OffloadForTarget(OffloadState& state, OffloadStatsRecorder& stats, c10::Device device,
                      const NodeId& node, TensorDepartures& departures);

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_LATE_LEAVERS_H_
