#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/device/cuda/cuda_backend.h"
#include "pinion/shared/backend_by_name.h"

namespace pinion {

absl::StatusOr<DeviceBackend> BackendByName(const std::string& device_type) {
  if (device_type == "cuda") return CudaBackend();
  return absl::InvalidArgumentError(
      absl::StrCat("this library has no devices of type \"", device_type, "\"; it has \"cuda\""));
}

}  // namespace pinion
