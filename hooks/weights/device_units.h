// The residency of streamed weights on one device: which units are resident, and where. Keeps the
// prefetcher (engine/schedule/weight_prefetcher.h) informed. Also has the units' bytes on the host
// (UnitParcel) and the memory of evicted units (DroppedWeights).
//
//   const PrefetchPlan plan = units.OnUse(unit, dropped);  // an operator is about to use the unit
//   ... DeviceWeights makes the copies ...
//   old = units.OnArrived(unit, stream, fetched);          // the unit's storages have memory
//   units.OnUsed(unit, dropped);                           // the operator's kernels are launched
//
// Memory of evicted units is appended to `dropped`. The caller frees it after releasing the lock:
// FreeDropped(dropped, engine).
//
// Thread safety: none; DeviceWeights' lock guards DeviceUnits. No function of DeviceUnits calls the
// device, the allocator or LibTorch. Exception: the pointers of storages, which are plain fields.
// Call FreeDropped without the lock. Parcels are thread-safe.
// Ownership: DeviceWeights (device_weights.h) owns DeviceUnits.

#ifndef PINION_HOOKS_WEIGHTS_DEVICE_UNITS_H_
#define PINION_HOOKS_WEIGHTS_DEVICE_UNITS_H_

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pinion/engine/schedule/reservation.h"
#include "pinion/engine/schedule/weight_prefetcher.h"
#include "pinion/engine/stream/wait_site.h"
#include "pinion/engine/tier/device_share.h"
#include "pinion/engine/tier/guarded_memory.h"
#include "pinion/engine/tier/parcel.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/wait_sites.h"
#include "pinion/hooks/weights/master_watch.h"
#include "pinion/hooks/weights/streamed_tensor.h"

namespace pinion {

// The bytes of a unit. Operators of all threads share one reader, which keeps fetched memory until
// Drop.
class WeightParcel final : public Parcel {
 public:
  using Parcel::Parcel;
  Reader reader;
};

// A storage of weights, and its place in the unit's parcel.
struct WeightPiece {
  std::string name;  // of a weight, for errors
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  uint64_t offset_bytes = 0;
};

// A unit of streamed weights: its bytes on the host, and the storages that get them on the device.
struct UnitParcel {
  std::string name;
  std::shared_ptr<WeightParcel> parcel;
  std::vector<WeightPiece> pieces;
  std::vector<std::shared_ptr<MasterWatch>> masters;  // by weight

  uint64_t size_bytes() const { return parcel->size_bytes; }

  // Returns a weight whose host copy was changed outside a step, or null.
  const MasterWatch* Changed(bool in_backward) const;
  // Sets the storages' memory to `data`, or to none if null. Returns their previous pointers.
  std::vector<c10::DataPtr> PointTo(void* data, ResidencyKeeper& keeper, c10::Device device) const;
};

// A weight's memory is freed after the work of all streams that have used it.
inline constexpr WaitSite kWeightUsedOnOtherStream("kWeightUsedOnOtherStream", kHooksWaits);

// Device memory of evicted weights.
struct DroppedWeights {
  StreamedBytes bytes;  // first, so that it is destroyed last
  GuardedMemory memory;
  std::vector<BoundStream> streams;  // that have used the memory
  std::vector<c10::DataPtr> data;
};

using AllDropped = std::vector<DroppedWeights>;

// Frees the memory, with no lock held, in the order of its own stream, which waits for the other
// ones. If the stream cannot wait, for example while another one captures a graph, leaks the memory
// and logs that.
void FreeDropped(AllDropped& dropped, TransferEngine& engine);

struct WeightStats {
  uint64_t fetches = 0;          // copies of units to the device
  uint64_t fetched_bytes = 0;    // of these copies
  uint64_t fetched_ahead = 0;    // copies that began before an operator needed the unit
  uint64_t fetches_refused = 0;  // fetches ahead that found no device memory
  uint64_t drops = 0;            // units evicted, for room or because the host has changed them
  uint64_t resident_bytes = 0;   // of units
  // The highest device memory above the memory target, or 0. Each use of a weight looks at the peak
  // of LibTorch's allocator. A peak from before the first use hides lower ones until the peak
  // statistics are reset. If weights alone exceed the target, a target of so many bytes is enough.
  uint64_t excess_device_bytes = 0;
  uint64_t gradient_bytes = 0;     // copied to the host
  uint64_t two_largest_bytes = 0;  // of the two largest units, which is the default window
};

// Device memory for units.
struct WeightRoom {
  uint64_t window_bytes = 0;  // for resident units; with a target, before the first use
  std::optional<uint64_t> target_bytes = std::nullopt;  // for everything on the device
  Reservation wanted;        // the part of a target that a session must leave for weights
  size_t leaving_units = 1;  // units whose gradients may be copied to the host at once
  uint64_t two_largest_bytes = 0;
};

struct WeightMemory {
  StreamedBytes bytes;  // first, so that it is destroyed last
  c10::Storage storage;
};

struct DeviceUnit {
  UnitParcel parts;
  StreamedBytes bytes;               // of the device memory
  GuardedMemory memory;              // empty unless resident, and used since the fetch
  std::vector<BoundStream> streams;  // streams that wait for the copy, and may use the unit
  int users = 0;                     // running operators, and fetches ahead not made yet

  bool IsReadyOn(const BoundStream& stream) const;
  // The stream waits for the copy.
  void NoteReadyOn(const BoundStream& stream) {
    if (!IsReadyOn(stream)) streams.push_back(stream);
  }
};

class DeviceUnits {
 public:
  // The units' storages share ownership of `keeper`, which owns this object.
  DeviceUnits(std::vector<UnitParcel> units, const WeightRoom& room, ResidencyKeeper& keeper,
              c10::Device device);

  DeviceUnit& operator[](uint32_t index) { return units_[index]; }
  const std::vector<DeviceUnit>& all() const { return units_; }
  // Returns all statistics except excess_device_bytes and gradient_bytes.
  WeightStats GetStats() const;

  // --- Use. A fetch that a PrefetchPlan asks for keeps its unit from eviction until EndFetch ---

  // Applies from the next use on.
  void set_window_bytes(uint64_t window_bytes) { prefetcher_.set_window_bytes(window_bytes); }
  PrefetchPlan OnUse(uint32_t index, AllDropped& dropped);
  PrefetchPlan OnUsed(uint32_t index, AllDropped& dropped);
  // The unit could not be fetched. Cancels the other fetches of the plan as well.
  void CancelUse(uint32_t index, const PrefetchPlan& plan);
  // The host has changed weights.
  PrefetchPlan OnChange(AllDropped& dropped);
  // A fetch ahead was made or has failed.
  void EndFetch(uint32_t index) { --units_[index].users; }

  // --- Copies to the device ---

  void CountFetch(uint64_t size_bytes, bool is_ahead);
  // A fetch ahead failed, or was left out without a try.
  void OnFetchRefused(uint32_t index, bool was_tried);
  // The stream waits for the copy to `fetched`, which is taken unless another thread has done so.
  // Returns the storages' previous pointers.
  std::vector<c10::DataPtr> OnArrived(uint32_t index, const BoundStream& stream,
                                      GuardedMemory& fetched);

  // --- Eviction ---

  // Does nothing unless the unit is resident or under copy.
  void Drop(uint32_t index, AllDropped& dropped);
  bool IsAnyInUse() const;
  // Evicts all units without users.
  void DropAllIdle(AllDropped& dropped);

 private:
  bool MayDrop(uint32_t index) const;
  // Evicts plan.evictions, and makes each of plan.fetches a user of its unit.
  PrefetchPlan Begin(PrefetchPlan plan, AllDropped& dropped);
  // Tells the prefetcher that a fetch failed, unless another thread fetches the unit.
  void NoteFailure(uint32_t index);

  ResidencyKeeper& keeper_;
  const c10::Device device_;
  std::vector<DeviceUnit> units_;
  WeightPrefetcher prefetcher_;
  WeightStats stats_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_DEVICE_UNITS_H_
