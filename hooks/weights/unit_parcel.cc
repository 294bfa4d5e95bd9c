#include "pinion/hooks/weights/unit_parcel.h"

#include <algorithm>

namespace pinion {

const MasterWatch* UnitParcel::Changed(bool in_backward) const {
  const auto changed = std::find_if(
      masters.begin(), masters.end(), [in_backward](const std::shared_ptr<MasterWatch>& master) {
        return in_backward ? master->HasNewVersion() : master->HasChangedInForward();
      });
  return changed == masters.end() ? nullptr : changed->get();
}

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
