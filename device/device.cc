#include "pinion/device/device.h"

namespace pinion {

const char* CopyDirectionName(CopyDirection direction) {
  return direction == CopyDirection::kHostToDevice ? "H2D" : "D2H";
}

}  // namespace pinion
