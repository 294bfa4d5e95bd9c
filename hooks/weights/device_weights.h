// The streamed weights of one device. Makes a unit resident when an operator needs it, and fetches
// and evicts units as the schedule says.
//
//   device_weights->Enter(unit, argument_bytes);   // an operator is about to use the unit
//   ...
//   device_weights->Leave(unit);                   // its kernels are launched
//
// DeviceUnits (device_units.h) has the state, and UnitArrivals (unit_arrivals.h) makes the copies.
// Within a memory target the window is what the target leaves (target_window.h).
//
// A unit is fetched with one copy, on the stream that needs it first. Its memory is freed in the
// order of that stream, after the other streams that have used it. Weights are never copied back:
// the host changes its copies between Pause and Resume, which evicts the changed units.
//
// Thread safety: thread-safe. No call of the device, the allocator or LibTorch is made with the
// lock held. Exception: the pointers of storages, which are plain fields.
// Ownership: shared by the storages of the weights (VisitingData).

#ifndef PINION_HOOKS_WEIGHTS_DEVICE_WEIGHTS_H_
#define PINION_HOOKS_WEIGHTS_DEVICE_WEIGHTS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "pinion/engine/schedule/set_aside.h"
#include "pinion/engine/schedule/visit_schedule.h"
#include "pinion/engine/tier/device_share.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/tier/host_tier.h"
#include "pinion/hooks/weights/device_units.h"
#include "pinion/hooks/weights/target_window.h"
#include "pinion/hooks/weights/unit_arrivals.h"
#include "pinion/hooks/weights/unit_parcel.h"
#include "pinion/hooks/weights/visiting_tensor.h"

namespace pinion {

class DeviceWeights final : public VisitKeeper {
 public:
  DeviceWeights(c10::Device device, std::shared_ptr<HostTier> host,
                std::shared_ptr<DeviceTier> tier, const WeightRoom& room,
                std::vector<UnitParcel> units);

  ~DeviceWeights() override;

  // Throws c10::OutOfMemoryError if the device has no memory even with all idle units evicted.
  void Enter(uint32_t unit, uint64_t argument_bytes) override;
  // Does not throw.
  void Leave(uint32_t unit) override;
  // Throws, and names the weight: writes to the device's copy would be lost.
  bool Write(uint32_t unit, const WritingOperator& op) override;

  // Lets the host change weights until Resume. Blocks until no copy reads them; operators that use
  // weights throw meanwhile.
  void Pause();
  // Evicts the changed units.
  void Resume(const std::vector<uint32_t>& changed);
  // After a change: fetches the units that are expected next, on the current stream.
  void FetchExpected();

  WeightStats GetStats() const;
  c10::Device device() const { return device_; }

 private:
  // Fetches on the current stream. Does not throw: units that fail are fetched on demand.
  void FetchAllAhead(const Visit& visit);

  const c10::Device device_;
  const std::shared_ptr<HostTier> host_;
  const std::shared_ptr<DeviceTier> tier_;
  const SetAside wanted_;
  const std::shared_ptr<Visitor> visitor_ = std::make_shared<Visitor>();

  WeightState state_;
  UnitArrivals arrivals_;
  const std::unique_ptr<TargetWindow> target_ ABSL_PT_GUARDED_BY(state_.mu);  // null: no target
  bool paused_ ABSL_GUARDED_BY(state_.mu) = false;
};

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_DEVICE_WEIGHTS_H_
