// Weights that have left a device: what they had there, to be let go of with no lock held.
//
// Thread safety: values.

#ifndef PINION_HOOKS_WEIGHTS_DROPPED_WEIGHTS_H_
#define PINION_HOOKS_WEIGHTS_DROPPED_WEIGHTS_H_

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

#include <vector>

#include "pinion/device/device.h"
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
  c10::Storage wide;  // goes in the order of the first stream, `memory` in that of its own
  std::vector<BoundStream> streams;  // that have used it
  std::vector<c10::DataPtr> data;

  StreamHandle owner() const;  // the stream in whose order it goes
  void Leak();
};

// Each owner waits for the other streams; if it cannot, as while one of them captures a graph, the
// memory is never given back, and the log says so.
void LetGoOf(std::vector<DroppedWeights>& dropped, TransferEngine& engine);

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_DROPPED_WEIGHTS_H_
