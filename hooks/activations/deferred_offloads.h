// Deferred offloads: tensors that were planned as resident and must be offloaded after all, because
// others had to be offloaded first or because the step differs from its plan.

#ifndef PINION_HOOKS_ACTIVATIONS_DEFERRED_OFFLOADS_H_
#define PINION_HOOKS_ACTIVATIONS_DEFERRED_OFFLOADS_H_

#include <c10/core/Device.h>

#include "absl/base/thread_annotations.h"
#include "pinion/hooks/activations/offload_state.h"
#include "pinion/hooks/activations/offload_stats_recorder.h"
#include "pinion/hooks/activations/storage_record.h"
#include "pinion/hooks/activations/tensor_departures.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {

// Adds the schedule's deferred offloads to `due`, or to the pending tensors if their operators may
// still run, and sorts `due`. Releases the memory of tensors that are recast. `node` is the last
// node that has saved something.
void TakeDeferredOffloads(OffloadState& state, OffloadStatsRecorder& stats, const NodeId& node,
                          DueRecords& due, Released& released)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(state.mu, kRecordsLock);

// Evicts idle streamed weights, then offloads and evicts until the step keeps within its target, or
// nothing more can be offloaded.
void OffloadForTarget(OffloadState& state, OffloadStatsRecorder& stats, c10::Device device,
                      const NodeId& node, TensorDepartures& departures);

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_DEFERRED_OFFLOADS_H_
