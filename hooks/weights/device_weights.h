// The weights of one device that visit it: their masters in pinned host memory, one parcel for each
// unit (weight_units.h), and memory on the device for those that are there.
//
//   device_weights->Enter(unit);      // an operator is about to use it (visiting_tensor.h)
//   ...
//   device_weights->Leave(unit);      // its kernels are launched
//
// This class decides what comes and goes, by device_units.h; unit_arrivals.h brings it. Within a
// memory target, the schedule's window is what the target leaves (target_window.h).
//
// A unit comes with one copy, on the stream that asks first, and stays until the schedule
// (engine/plan/visit_schedule.h) wants its room: then the memory goes in the order of that stream,
// after all others that have used it. Nothing is ever copied back: masters are changed on the host,
// between Pause and Resume, and what the device has of those that were changed is dropped.
//
// Thread safety: thread-safe. No call of the device, the allocator or LibTorch is made with the
// lock held, but for storages' pointers, which are plain fields.
// Ownership: storages of the weights keep it (VisitingData).

#ifndef PINION_HOOKS_WEIGHTS_DEVICE_WEIGHTS_H_
#define PINION_HOOKS_WEIGHTS_DEVICE_WEIGHTS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "pinion/engine/plan/set_aside.h"
#include "pinion/engine/plan/visit_schedule.h"
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

  // c10::OutOfMemoryError where the device has no room even with all other units dropped.
  void Enter(uint32_t unit, uint64_t argument_bytes) override;
  // Does not throw.
  void Leave(uint32_t unit) override;
  // Throws, and names the weight: what is on the device is a copy.
  bool Write(uint32_t unit, const WritingOperator& op) override;

  // From now until Resume the host may change masters: copies that read them are done, and no
  // operator gets weights.
  void Pause();
  // Drops what the device has of the units that were changed.
  void Resume(const std::vector<uint32_t>& changed);
  // After a change: what is expected to be used next is fetched, on the current stream.
  void FetchExpected();

  WeightStats GetStats() const;
  c10::Device device() const { return device_; }

 private:
  // On the current stream. Does not throw: what cannot be fetched now is fetched when needed.
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
