// Weights that have left a device: what they had there, to be let go of with no lock held.
//
// Thread safety: values.

#ifndef PINION_HOOKS_WEIGHTS_DROPPED_WEIGHTS_H_
#define PINION_HOOKS_WEIGHTS_DROPPED_WEIGHTS_H_

#include <c10/core/Allocator.h>

#include <vector>

#include "pinion/engine/stream/wait_site.h"
#include "pinion/engine/tier/device_share.h"
#include "pinion/engine/tier/guarded_memory.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/wait_sites.h"

namespace pinion {

// A weight's memory goes after the streams that have used it.
inline constexpr WaitSite kWeightUsedOnOtherStream("kWeightUsedOnOtherStream", kHooksWaits);

struct DroppedWeights {
  VisitingBytes bytes;  // last to go
  GuardedMemory memory;
  std::vector<BoundStream> streams;  // that have used it
  std::vector<c10::DataPtr> data;
};

// The stream of each memory waits for the other ones; if it cannot, as while one of them captures a
// graph, the memory is never given back, and the log says so.
void LetGoOf(std::vector<DroppedWeights>& dropped, TransferEngine& engine);

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_DROPPED_WEIGHTS_H_
