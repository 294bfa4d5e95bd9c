// What one device contributes to the list of live tensors (live_tensor.h).

#ifndef PINION_HOOKS_ACTIVATIONS_LIVE_RECORDS_H_
#define PINION_HOOKS_ACTIVATIONS_LIVE_RECORDS_H_

#include <c10/core/Device.h>

#include <vector>

#include "pinion/hooks/activations/live_tensor.h"
#include "pinion/hooks/activations/offload_state.h"

namespace pinion {

// What has live handles, in the order in which it was saved last. Takes the state's
// lock, and makes the texts after it.
void AppendLiveOf(OffloadState& state, c10::Device device, std::vector<LiveTensor>& tensors);

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_LIVE_RECORDS_H_
