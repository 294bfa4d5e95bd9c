// How units of weights come to their device: memory for them, and the copy.
//
//   arrivals.Arrive(unit, stream);       // from now on the stream may use it
//   arrivals.FetchAhead(other, stream);  // as far as there is room
//
// Thread safety: thread-safe. The state's lock is not held while anything is allocated, copied or
// waited for.
// Ownership: DeviceWeights's, and so is the state, which outlives it.

#ifndef PINION_HOOKS_WEIGHTS_UNIT_ARRIVALS_H_
#define PINION_HOOKS_WEIGHTS_UNIT_ARRIVALS_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/engine/plan/back_off.h"
#include "pinion/engine/stream/wait_site.h"
#include "pinion/engine/tier/device_share.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/tier/guarded_memory.h"
#include "pinion/engine/tier/parcel.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/wait_sites.h"
#include "pinion/hooks/weights/device_units.h"
#include "pinion/hooks/weights/unit_parcel.h"

namespace pinion {

// A stream reads a weight after its copy in.
inline constexpr WaitSite kWeightAfterCopyIn("kWeightAfterCopyIn", kHooksWaits);

class UnitArrivals {
 public:
  UnitArrivals(WeightState& state, std::shared_ptr<DeviceTier> tier,
               std::shared_ptr<Visitor> visitor, std::vector<std::shared_ptr<WeightParcel>> parcels)
      : state_(state),
        tier_(std::move(tier)),
        visitor_(std::move(visitor)),
        parcels_(std::move(parcels)) {}

  // Unless it is there, the unit is fetched, by this thread or another one. c10::OutOfMemoryError
  // where the device has no room even with all other units dropped.
  void Arrive(uint32_t index, const BoundStream& stream);
  // Does not throw: what cannot be fetched now is fetched when needed. After a fetch for which the
  // device had no free memory, some others are left out.
  void FetchAhead(uint32_t index, const BoundStream& stream);
  // Copies that read masters are done.
  absl::Status WaitForCopies() const;

 private:
  WeightMemory Allocate(uint64_t size_bytes, const BoundStream& stream) const;
  // Drops what nobody uses where the device has no room at once.
  WeightMemory AllocateNow(uint32_t index, uint64_t size_bytes, const BoundStream& stream);
  absl::Status Fetch(uint32_t index, FetchClaim& claim, WeightMemory memory,
                     const BoundStream& stream, bool is_ahead);

  WeightState& state_;
  const std::shared_ptr<DeviceTier> tier_;
  const std::shared_ptr<Visitor> visitor_;
  const std::vector<std::shared_ptr<WeightParcel>> parcels_;  // by unit
  BackOff back_off_ ABSL_GUARDED_BY(state_.mu);               // in fetches ahead
};

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_UNIT_ARRIVALS_H_
