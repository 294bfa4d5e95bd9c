// What a unit of weights that visit is made of: its bytes on the host, and the storages that show
// them on the device.
//
// Thread safety: a parcel has its own; the rest is guarded by its owner.

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

// A unit's weights. Operators of all threads read it as one reader.
class WeightParcel final : public Parcel {
 public:
  using Parcel::Parcel;
  Reader reader;
};

// A storage of weights, as a part of its unit's parcel.
struct WeightPiece {
  std::string name;  // of its weights, for errors
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  uint64_t offset_bytes = 0;
};

struct UnitParcel {
  std::string name;
  std::shared_ptr<WeightParcel> parcel;  // away
  std::vector<WeightPiece> pieces;
  std::vector<std::shared_ptr<MasterWatch>> masters;  // by weight

  uint64_t size_bytes() const { return parcel->size_bytes; }

  // A weight whose master was changed while it may be on the device; null without one.
  const MasterWatch* Changed(bool in_backward) const;
  // Their bytes are at `data` from now on; null: away. Returns what they had before.
  std::vector<c10::DataPtr> PointTo(void* data, VisitKeeper& keeper, c10::Device device) const;
};

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_UNIT_PARCEL_H_
