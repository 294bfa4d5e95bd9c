// Which way bytes go between host and device.

#ifndef PINION_DEVICE_COPY_DIRECTION_H_
#define PINION_DEVICE_COPY_DIRECTION_H_

namespace pinion {

enum class CopyDirection { kHostToDevice, kDeviceToHost };

// "H2D", "D2H"
constexpr const char* CopyDirectionName(CopyDirection direction) {
  return direction == CopyDirection::kHostToDevice ? "H2D" : "D2H";
}

}  // namespace pinion

#endif  // PINION_DEVICE_COPY_DIRECTION_H_
