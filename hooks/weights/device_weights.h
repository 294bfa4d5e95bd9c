// The weights of one device that visit it: their masters in pinned host memory, one parcel for each
// unit (weight_units.h), and memory on the device for those that are there.
//
//   device_weights->Enter(unit);      // an operator is about to use it (visiting_tensor.h)
//   ...
//   device_weights->Leave(unit);      // its kernels are launched
//
// Within a memory target, the schedule's window is what the target leaves (target_window.h).
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
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/engine/plan/set_aside.h"
#include "pinion/engine/plan/visit_schedule.h"
#include "pinion/engine/stream/wait_site.h"
#include "pinion/engine/tier/device_share.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/tier/guarded_memory.h"
#include "pinion/engine/tier/host_tier.h"
#include "pinion/engine/tier/parcel.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/wait_sites.h"
#include "pinion/hooks/weights/dropped_weights.h"
#include "pinion/hooks/weights/target_window.h"
#include "pinion/hooks/weights/unit_parcel.h"
#include "pinion/hooks/weights/visiting_tensor.h"

namespace pinion {

// A stream reads a weight after its copy in.
inline constexpr WaitSite kWeightAfterCopyIn("kWeightAfterCopyIn", kHooksWaits);

// Another stream uses a weight that one has widened.
inline constexpr WaitSite kWeightAfterWidening("kWeightAfterWidening", kHooksWaits);

struct WeightStats {
  uint64_t fetches = 0;          // copies in, of whole units
  uint64_t fetched_bytes = 0;    // by them
  uint64_t fetched_ahead = 0;    // of those copies, the ones that began before anybody needed them
  uint64_t fetches_refused = 0;  // ahead, as there was no device memory; made when needed
  uint64_t drops = 0;            // of units, to make room or since they had become old
  uint64_t here_bytes = 0;       // on the device
  // Within a memory target: the most that the device had, if that was more, as the next use of a
  // weight sees it: where it had even more before the first use, not until LibTorch's peak
  // statistics are reset. Where weights alone take what is too much, a target of so many bytes is
  // enough.
  uint64_t excess_device_bytes = 0;
  uint64_t gradient_bytes = 0;     // that have left the device
  uint64_t two_largest_bytes = 0;  // of units: the default window
};

// For units that are there at once.
struct WeightRoom {
  uint64_t window_bytes = 0;  // for all of them; with a target, before the first use
  std::optional<uint64_t> target_bytes = std::nullopt;  // of the device, for all that it has
  // What a unit takes beside itself while it is being widened, at the most: no part of the window.
  uint64_t widening_bytes = 0;
  SetAside wanted;           // of a target that others plan within
  size_t leaving_units = 1;  // whose gradients may be on their way at once
  uint64_t two_largest_bytes = 0;
};

struct WeightMemory {
  VisitingBytes bytes;  // last to go
  c10::Storage storage;
};

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
  std::string NameOf(uint32_t unit, const at::Tensor& tensor) const override;

  // From now until Resume the host may change masters: copies that read them are done, and no
  // operator gets weights.
  void Pause();
  // Drops what the device has of the units that were changed.
  void Resume(const std::vector<uint32_t>& changed);
  // After a change: what is expected to be used next is fetched, on the current stream.
  void FetchExpected();

  WeightStats GetStats() const;
  DeviceTier& tier() const { return *tier_; }
  c10::Device device() const { return device_; }

 private:
  struct Unit {
    UnitParcel parts;
    VisitingBytes bytes;   // that are there
    GuardedMemory memory;  // empty: not on the device, or not used there yet
    // In place of `memory`, of a unit that is widened. Belongs to the first one of `streams`.
    c10::Storage wide;
    bool is_being_widened = false;     // by a thread
    std::vector<BoundStream> streams;  // that wait for its copy, and may use it
    int users = 0;                     // operators that run, and fetches that are about to be made

    bool IsReadyOn(const BoundStream& stream) const;
  };
  using AllDropped = std::vector<DroppedWeights>;

  // Drops, and keeps what is to be fetched from being dropped until it was.
  void Begin(const Visit& visit, AllDropped& dropped) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // On the current stream. Does not throw: what cannot be fetched now is fetched when needed.
  void FetchAllAhead(const Visit& visit);
  // Whatever there is of it; nothing if it is away.
  void Drop(uint32_t index, AllDropped& dropped) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // After a fetch that failed: away, unless another thread has it or is about to.
  void NoteFailure(uint32_t index) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DropAllIdle();
  // With the bytes on the device, after their copy.
  void Arrive(uint32_t index, const BoundStream& stream);
  // The same, of a unit that rests in a narrower form; what was copied is let go of.
  void ArriveWide(uint32_t index, const BoundStream& stream);
  // What was copied, once the stream waits for that.
  GuardedMemory WaitForCopy(uint32_t index, const BoundStream& stream);
  // Drops what nobody uses where the device has no room at once.
  WeightMemory AllocateNow(uint32_t index, uint64_t size_bytes, const BoundStream& stream);
  absl::Status Fetch(uint32_t index, FetchClaim& claim, WeightMemory memory,
                     const BoundStream& stream, bool is_ahead);
  void FetchAhead(uint32_t index, const BoundStream& stream);
  bool MayDrop(uint32_t index) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const c10::Device device_;
  const std::shared_ptr<HostTier> host_;
  const std::shared_ptr<DeviceTier> tier_;
  const SetAside wanted_;
  const std::vector<std::shared_ptr<WeightParcel>> parcels_;  // by unit
  const std::shared_ptr<Visitor> visitor_ = std::make_shared<Visitor>();

  mutable Mutex mu_;
  const std::unique_ptr<TargetWindow> target_ ABSL_PT_GUARDED_BY(mu_);  // null: no target
  CondVar widened_;
  std::vector<Unit> units_ ABSL_GUARDED_BY(mu_);
  VisitSchedule schedule_ ABSL_GUARDED_BY(mu_);
  WeightStats stats_ ABSL_GUARDED_BY(mu_);
  bool paused_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_DEVICE_WEIGHTS_H_
