// Device memory of evicted weights, to be freed with no lock held.
//
//   LetGoOf(dropped, engine);   // after the streams that have used it
//
// Thread safety: none; a plain value.

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

// A weight's memory is freed after the work of all streams that have used it.
inline constexpr WaitSite kWeightUsedOnOtherStream("kWeightUsedOnOtherStream", kHooksWaits);

struct DroppedWeights {
  VisitingBytes bytes;  // first, so that it is destroyed last
  GuardedMemory memory;
  std::vector<BoundStream> streams;  // that have used the memory
  std::vector<c10::DataPtr> data;
};

// Frees the memory in the order of its own stream, which waits for the other ones. If the stream
// cannot wait, for example while another one captures a graph, leaks the memory and logs that.
void LetGoOf(std::vector<DroppedWeights>& dropped, TransferEngine& engine);

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_DROPPED_WEIGHTS_H_
