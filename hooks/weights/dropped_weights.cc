#include "pinion/hooks/weights/dropped_weights.h"

#include <utility>

#include "absl/status/status.h"
#include "pinion/allocator/base/check.h"
#include "pinion/hooks/tier/torch_memory.h"

namespace pinion {

StreamHandle DroppedWeights::owner() const {
  return wide ? streams.front().native : memory.stream();
}

void DroppedWeights::Leak() {
  c10::Storage leaked = wide ? std::move(wide) : StorageOf(memory.memory());
  leaked.unsafeReleaseStorageImpl();
}

void LetGoOf(std::vector<DroppedWeights>& dropped, TransferEngine& engine) {
  for (DroppedWeights& drop : dropped) {
    if (!drop.memory && !drop.wide) continue;
    const StreamHandle owner = drop.owner();
    for (const BoundStream& stream : drop.streams) {
      if (stream.native == owner) continue;
      const absl::Status ordered =
          engine.OrderStreams(stream.native, owner, kWeightUsedOnOtherStream);
      if (ordered.ok()) continue;
      PINION_LOG(kWarning) << "the memory of weights is not given back: " << ordered.ToString();
      drop.Leak();
      break;
    }
  }
  dropped.clear();
}

}  // namespace pinion
