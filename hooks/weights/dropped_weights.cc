#include "pinion/hooks/weights/dropped_weights.h"

#include <utility>

#include "absl/status/status.h"
#include "pinion/allocator/base/check.h"
#include "pinion/hooks/tier/torch_memory.h"

namespace pinion {

void LetGoOf(std::vector<DroppedWeights>& dropped, TransferEngine& engine) {
  for (DroppedWeights& drop : dropped) {
    const StreamHandle owner = drop.memory.stream();
    for (const BoundStream& stream : drop.streams) {
      if (stream.native == owner) continue;
      const absl::Status ordered =
          engine.OrderStreams(stream.native, owner, kWeightUsedOnOtherStream);
      if (ordered.ok()) continue;
      PINION_LOG(kWarning) << "the memory of weights is not given back: " << ordered.ToString();
      c10::Storage leaked = StorageOf(drop.memory.memory());
      leaked.unsafeReleaseStorageImpl();
      break;
    }
  }
  dropped.clear();
}

}  // namespace pinion
