#include "pinion/device/device_backend.h"

#include "pinion/allocator/base/status_macros.h"

namespace pinion {

absl::Status DeviceBackend::Validate() const {
  if (device != nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError("DeviceBackend::device of \"" + type_name +
                                    "\" is not set: use CudaBackend() or EmulatedBackend(machine), "
                                    "or set a function that returns devices");
}

absl::StatusOr<std::shared_ptr<Device>> DeviceBackend::Open(int index) const {
  PINION_RETURN_IF_ERROR(Validate());
  absl::StatusOr<std::shared_ptr<Device>> opened = device(index);
  if (!opened.ok() || *opened != nullptr) return opened;
  return absl::InvalidArgumentError("DeviceBackend::device of \"" + type_name +
                                    "\" returned null for device " + std::to_string(index) +
                                    ": return NotFound where there is none");
}

}  // namespace pinion
