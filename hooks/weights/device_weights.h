// The streamed weights of one device. Makes a unit resident when an operator needs it, and fetches
// and evicts units as the prefetcher says.
//
//   device_weights->Enter(unit, argument_bytes);   // an operator is about to use the unit
//   ...
//   device_weights->Leave(unit);                   // its kernels are launched
//
// DeviceUnits (device_units.h) has the state. Within a memory target the window is what
// TargetWindow leaves. If the unit does not fit beside other models' weights, their idle units are
// evicted.
//
// A unit is fetched with one copy, on the stream that needs it first. Its memory is freed in the
// order of that stream, after the other streams that have used it. Weights are never copied back:
// the host changes its copies between Pause and Resume, which evicts the changed units.
//
// Thread safety: thread-safe. No call of the device, the allocator or LibTorch is made with the
// lock held. Exception: the pointers of storages, which are plain fields.
// Ownership: shared by the storages of the weights (StreamedData).

#ifndef PINION_HOOKS_WEIGHTS_DEVICE_WEIGHTS_H_
#define PINION_HOOKS_WEIGHTS_DEVICE_WEIGHTS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/engine/schedule/back_off.h"
#include "pinion/engine/schedule/reservation.h"
#include "pinion/engine/schedule/weight_prefetcher.h"
#include "pinion/engine/stream/wait_site.h"
#include "pinion/engine/tier/device_share.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/tier/host_tier.h"
#include "pinion/engine/tier/parcel.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/wait_sites.h"
#include "pinion/hooks/weights/device_units.h"
#include "pinion/hooks/weights/streamed_tensor.h"

namespace pinion {

// The window of streamed weights within a memory target: at each use, what the target leaves beside
// everything else on the device (engine/schedule/weight_prefetcher.h). All models share it. Thread
// safety: none.
//
//   const AllocatorBytes allocator = AllocatorBytesOf(device);   // with no lock held
//   const uint64_t all_bytes = window.AtUse(use, allocator);     // for the weights of all models
//   prefetcher.set_window_bytes(window.OwnBytes());              // beside other models' weights
class TargetWindow {
 public:
  TargetWindow(uint64_t target_bytes, std::shared_ptr<const DeviceShare> share,
               std::shared_ptr<const StreamedModel> weights)
      : target_bytes_(target_bytes),
        share_(std::move(share)),
        weights_(std::move(weights)),
        predictor_(target_bytes) {}

  // Returns the window of all models until the next use. `allocator` was read shortly before. A
  // unit that another thread fetches meanwhile may count twice or not at all.
  uint64_t AtUse(const WeightUse& use, const AllocatorBytes& allocator);
  // Returns what other models' weights leave of that window.
  uint64_t OwnBytes() const;

  // Device memory above the target.
  struct Excess {
    uint64_t device_bytes = 0;  // the peak since the first use
    uint64_t target_bytes = 0;
    uint32_t unit = 0;  // used last before the peak was seen
  };
  // Returns the first excess, once.
  std::optional<Excess> TakeFirstExcess();
  uint64_t excess_device_bytes() const { return excess_.device_bytes; }  // 0: no excess

 private:
  const uint64_t target_bytes_;
  const std::shared_ptr<const DeviceShare> share_;
  const std::shared_ptr<const StreamedModel> weights_;
  WindowPredictor predictor_;
  std::optional<uint32_t> last_unit_;
  uint64_t all_bytes_ = 0;  // the window at the last use
  int64_t peak_bytes_ = 0;  // the allocator's at the last use
  Excess excess_;
  bool is_told_ = false;
};

// A stream reads a weight after the weight's copy to the device.
inline constexpr WaitSite kWeightAfterCopyIn("kWeightAfterCopyIn", kHooksWaits);

class DeviceWeights final : public ResidencyKeeper, public EvictableWeights {
 public:
  DeviceWeights(c10::Device device, std::shared_ptr<HostTier> host,
                std::shared_ptr<DeviceTier> tier, const WeightRoom& room,
                std::vector<UnitParcel> units);

  ~DeviceWeights() override;

  // Throws c10::OutOfMemoryError if the device has no memory even with all models' idle units
  // evicted.
  void Enter(uint32_t unit, uint64_t argument_bytes) override;
  // Does not throw.
  void Leave(uint32_t unit) override;
  // Throws, and names the weight: writes to the device's copy would be lost.
  bool Write(uint32_t unit, const WritingOperator& op) override;
  // Logs the first weight.
  void OnReplaced(uint32_t unit, const at::Tensor& weight) override;
  void EvictIdle(bool unless_in_use) override;

  // Lets the host change weights until Resume. Blocks until no copy reads them; operators that use
  // weights throw meanwhile.
  void Pause(const char* call);
  // Evicts the changed units.
  void Resume(const std::vector<uint32_t>& changed);
  // After a change: fetches the units that are expected next, on the current stream.
  void FetchExpected();

  WeightStats GetStats() const;

 private:
  std::string NameOf(uint32_t unit, const at::Tensor& weight) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Computes the window for a use. Evicts other models' idle units if the used one does not fit
  // beside them.
  void MakeRoom(const WeightUse& use);
  // Sets the window to what other models' weights leave.
  void UpdateWindow() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (target_ != nullptr) units_.set_window_bytes(target_->OwnBytes());
  }
  // Makes the unit resident for the stream, and fetches the unit if no thread has done so. Throws
  // c10::OutOfMemoryError if the device has no memory even with all models' idle units evicted.
  void Arrive(uint32_t index, const BoundStream& stream);
  // Starts a copy if the device has memory. Does not throw: a unit that cannot be fetched ahead is
  // fetched on demand. Backs off after an allocation that failed, and after one that made LibTorch
  // free its cache.
  void FetchAhead(uint32_t index, const BoundStream& stream);
  // Calls FetchAhead for all fetches of the plan, on the current stream.
  void FetchAllAhead(const PrefetchPlan& plan);
  WeightMemory Allocate(uint64_t size_bytes, const BoundStream& stream) const;
  // Evicts all models' idle units and tries again if the device has no memory.
  WeightMemory AllocateNow(uint32_t index, uint64_t size_bytes, const BoundStream& stream);
  absl::Status Fetch(uint32_t index, FetchClaim& claim, WeightMemory memory,
                     const BoundStream& stream, bool is_ahead);
  // Blocks until no copy reads host copies.
  absl::Status WaitForCopies() const;

  const c10::Device device_;
  const std::shared_ptr<HostTier> host_;
  const std::shared_ptr<DeviceTier> tier_;
  const Reservation wanted_;
  const std::shared_ptr<StreamedModel> model_ = std::make_shared<StreamedModel>();
  const std::vector<std::shared_ptr<WeightParcel>> parcels_;  // by unit

  mutable Mutex mu_;
  DeviceUnits units_ ABSL_GUARDED_BY(mu_);
  BackOff back_off_ ABSL_GUARDED_BY(mu_);                               // of FetchAhead
  const std::unique_ptr<TargetWindow> target_ ABSL_PT_GUARDED_BY(mu_);  // null: no target
  const char* paused_by_ ABSL_GUARDED_BY(mu_) = nullptr;                // null: not paused
  bool has_told_of_replaced_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_DEVICE_WEIGHTS_H_
