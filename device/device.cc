#include "pinion/device/device.h"

namespace pinion {

const char* CopyDirectionName(CopyDirection direction) {
  return direction == CopyDirection::kHostToDevice ? "H2D" : "D2H";
}

DeviceErrorClass ClassifyDeviceError(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return DeviceErrorClass::kNone;
    case absl::StatusCode::kResourceExhausted:
      return DeviceErrorClass::kOutOfMemory;
    case absl::StatusCode::kUnavailable:
    case absl::StatusCode::kDeadlineExceeded:
      return DeviceErrorClass::kTransient;
    case absl::StatusCode::kInternal:
      return DeviceErrorClass::kSticky;
    default:
      return DeviceErrorClass::kCallerBug;
  }
}

}  // namespace pinion
