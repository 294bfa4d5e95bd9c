#include "pinion/hooks/weights/unit_parcel.h"

namespace pinion {

std::vector<c10::DataPtr> UnitParcel::PointTo(void* data, VisitKeeper& keeper,
                                              c10::Device device) const {
  std::vector<c10::DataPtr> before;
  for (const WeightPiece& piece : pieces) {
    const auto storage = piece.storage.lock();
    if (!storage) continue;
    char* const begin = data == nullptr ? nullptr : static_cast<char*>(data) + piece.offset_bytes;
    before.push_back(storage->set_data_ptr(VisitingData(begin, keeper.shared_from_this(), device)));
  }
  return before;
}

}  // namespace pinion
