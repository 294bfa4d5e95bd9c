// Lists one device's live tensors (live_tensor.h).

#ifndef PINION_HOOKS_ACTIVATIONS_LIVE_RECORDS_H_
#define PINION_HOOKS_ACTIVATIONS_LIVE_RECORDS_H_

#include <c10/core/Device.h>

#include <vector>

#include "pinion/hooks/activations/live_tensor.h"
#include "pinion/hooks/activations/offload_state.h"

namespace pinion {

// Appends the records with live handles, in the order of their last save. Takes the state's lock;
// formats texts outside it.
void AppendLiveOf(OffloadState& state, c10::Device device, std::vector<LiveTensor>& tensors);

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_LIVE_RECORDS_H_
