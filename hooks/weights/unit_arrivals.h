// Fetches units of weights: allocates device memory for a unit, and copies the unit there.
//
//   arrivals.Arrive(unit, stream);       // the stream may use the unit
//   arrivals.FetchAhead(other, stream);  // starts a copy if the device has memory
//
// Thread safety: thread-safe. The state's lock is not held during allocations, copies and waits.
// Ownership: DeviceWeights owns this object and the state, which outlives it.

#ifndef PINION_HOOKS_WEIGHTS_UNIT_ARRIVALS_H_
#define PINION_HOOKS_WEIGHTS_UNIT_ARRIVALS_H_

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/engine/schedule/back_off.h"
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

// A stream reads a weight after the weight's copy to the device.
inline constexpr WaitSite kWeightAfterCopyIn("kWeightAfterCopyIn", kHooksWaits);

class UnitArrivals {
 public:
  UnitArrivals(WeightState& state, std::shared_ptr<DeviceTier> tier,
               std::shared_ptr<Visitor> visitor, std::vector<std::shared_ptr<WeightParcel>> parcels)
      : state_(state),
        tier_(std::move(tier)),
        visitor_(std::move(visitor)),
        parcels_(std::move(parcels)) {}

  // Makes the unit resident for the stream, and fetches the unit if no thread has done so. Throws
  // c10::OutOfMemoryError if the device has no memory even with all idle units evicted.
  void Arrive(uint32_t index, const BoundStream& stream);
  // Does not throw: a unit that cannot be fetched ahead is fetched on demand. Backs off after an
  // allocation that failed, and after one that made LibTorch free its cache.
  void FetchAhead(uint32_t index, const BoundStream& stream);
  // Blocks until no copy reads host copies.
  absl::Status WaitForCopies() const;

 private:
  WeightMemory Allocate(uint64_t size_bytes, const BoundStream& stream) const;
  // Evicts all idle units and tries again if the device has no memory.
  WeightMemory AllocateNow(uint32_t index, uint64_t size_bytes, const BoundStream& stream);
  absl::Status Fetch(uint32_t index, FetchClaim& claim, WeightMemory memory,
                     const BoundStream& stream, bool is_ahead);

  WeightState& state_;
  const std::shared_ptr<DeviceTier> tier_;
  const std::shared_ptr<Visitor> visitor_;
  const std::vector<std::shared_ptr<WeightParcel>> parcels_;  // by unit
  BackOff back_off_ ABSL_GUARDED_BY(state_.mu);               // of FetchAhead
};

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_UNIT_ARRIVALS_H_
