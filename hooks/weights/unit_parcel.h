// A unit of streamed weights: its bytes on the host, and the storages that get them on the device.
//
//   for (const c10::DataPtr& old : unit.PointTo(data, keeper, device)) ...   // resident at `data`
//
// Thread safety: parcels are thread-safe. The owner guards the rest.

#ifndef PINION_HOOKS_WEIGHTS_UNIT_PARCEL_H_
#define PINION_HOOKS_WEIGHTS_UNIT_PARCEL_H_

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pinion/engine/tier/parcel.h"
#include "pinion/hooks/weights/master_watch.h"
#include "pinion/hooks/weights/visiting_tensor.h"

namespace pinion {

// The bytes of a unit. Operators of all threads share one reader.
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

struct UnitParcel {
  std::string name;
  std::shared_ptr<WeightParcel> parcel;
  std::vector<WeightPiece> pieces;
  std::vector<std::shared_ptr<MasterWatch>> masters;  // by weight

  uint64_t size_bytes() const { return parcel->size_bytes; }

  // Returns a weight whose host copy was changed outside a step, or null.
  const MasterWatch* Changed(bool in_backward) const;
  // Sets the storages' memory to `data`, or to none if null. Returns their previous pointers.
  std::vector<c10::DataPtr> PointTo(void* data, VisitKeeper& keeper, c10::Device device) const;
};

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_UNIT_PARCEL_H_
