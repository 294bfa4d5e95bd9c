// What one device has of the units of weights that visit it, and the schedule that is told of it.
//
//   const Visit visit = units.OnUse(unit, dropped);   // an operator is about to use it
//   ... the copies are made (unit_arrivals.h) ...
//   away = units.OnArrived(unit, stream, fetched);    // its storages have the bytes
//   units.OnUsed(unit, dropped);                      // its kernels are launched
//
// What leaves is handed out, and let go of once the lock is released.
//
// Thread safety: none; WeightState's lock guards it. No call of the device, the allocator or
// LibTorch is made, but for storages' pointers, which are plain fields. Ownership: DeviceWeights's;
// UnitArrivals works on it.

#ifndef PINION_HOOKS_WEIGHTS_DEVICE_UNITS_H_
#define PINION_HOOKS_WEIGHTS_DEVICE_UNITS_H_

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/engine/plan/set_aside.h"
#include "pinion/engine/plan/visit_schedule.h"
#include "pinion/engine/tier/device_share.h"
#include "pinion/engine/tier/guarded_memory.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/weights/dropped_weights.h"
#include "pinion/hooks/weights/unit_parcel.h"
#include "pinion/hooks/weights/visiting_tensor.h"

namespace pinion {

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
  SetAside wanted;                                      // of a target that others plan within
  size_t leaving_units = 1;  // whose gradients may be on their way at once
  uint64_t two_largest_bytes = 0;
};

struct WeightMemory {
  VisitingBytes bytes;  // last to go
  c10::Storage storage;
};

using AllDropped = std::vector<DroppedWeights>;

struct DeviceUnit {
  UnitParcel parts;
  VisitingBytes bytes;               // that are there
  GuardedMemory memory;              // empty: not on the device, or not used there yet
  std::vector<BoundStream> streams;  // that wait for its copy, and may use it
  int users = 0;                     // operators that run, and fetches that are about to be made

  bool IsReadyOn(const BoundStream& stream) const;
  // It waits for the copy.
  void NoteReadyOn(const BoundStream& stream) {
    if (!IsReadyOn(stream)) streams.push_back(stream);
  }
};

class DeviceUnits {
 public:
  // Their storages keep the keeper, and only while they do is anything on the device.
  DeviceUnits(std::vector<UnitParcel> units, const WeightRoom& room, VisitKeeper& keeper,
              c10::Device device);

  DeviceUnit& operator[](uint32_t index) { return units_[index]; }
  const DeviceUnit& operator[](uint32_t index) const { return units_[index]; }
  const std::vector<DeviceUnit>& all() const { return units_; }
  // All but what a target knows.
  WeightStats GetStats() const;

  // --- use. What a visit fetches is not dropped before EndFetch ---

  // From the next use on, for all units.
  void set_window_bytes(uint64_t window_bytes) { schedule_.set_window_bytes(window_bytes); }
  Visit OnUse(uint32_t index, AllDropped& dropped);
  Visit OnUsed(uint32_t index, AllDropped& dropped);
  // It could not be brought, nor was what else the visit fetches.
  void CancelUse(uint32_t index, const Visit& visit);
  // The host has changed masters.
  Visit OnChange(AllDropped& dropped);
  // The copy was made, or could not be.
  void EndFetch(uint32_t index) { --units_[index].users; }

  // --- copies in ---

  void CountFetch(uint64_t size_bytes, bool is_ahead);
  // Ahead, and counted if it was tried.
  void OnFetchRefused(uint32_t index, bool was_tried);
  // The bytes are at `fetched` for the stream, which waits for them. It is taken, unless another
  // thread was faster. Returns what the storages had before.
  std::vector<c10::DataPtr> OnArrived(uint32_t index, const BoundStream& stream,
                                      GuardedMemory& fetched);

  // --- out ---

  // Whatever there is of it; nothing if it is away.
  void Drop(uint32_t index, AllDropped& dropped);
  // What nobody uses.
  void DropAllIdle(AllDropped& dropped);

 private:
  bool MayDrop(uint32_t index) const;
  // Drops, and keeps what is to be fetched from being dropped until it was.
  Visit Begin(Visit visit, AllDropped& dropped);
  // After a fetch that failed: away, unless another thread has it or is about to.
  void NoteFailure(uint32_t index);

  VisitKeeper& keeper_;
  const c10::Device device_;
  std::vector<DeviceUnit> units_;
  VisitSchedule schedule_;
  WeightStats stats_;
};

struct WeightState {
  mutable Mutex mu;
  DeviceUnits units ABSL_GUARDED_BY(mu);
};

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_DEVICE_UNITS_H_
