#include "pinion/device/cuda/cuda_backend.h"

#include <memory>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/cuda/cuda_calls.h"
#include "pinion/device/cuda/cuda_device.h"

namespace pinion {

DeviceBackend CudaBackend(const CudaApi& api) {
  const auto device = [&api](int index) -> absl::StatusOr<std::shared_ptr<Device>> {
    PINION_ASSIGN_OR_RETURN(const int count, CudaDeviceCount(api));
    if (index < 0 || index >= count) {
      return absl::NotFoundError(absl::StrCat("there is no cuda:", index, "; CUDA sees ", count,
                                              " device(s): pass 0 to ", count - 1,
                                              ", or let CUDA_VISIBLE_DEVICES show more"));
    }
    return std::make_shared<CudaDevice>(api, index);
  };
  return {"cuda", device, &api};
}

absl::StatusOr<int> CudaDeviceCount(const CudaApi& api) {
  PINION_RETURN_IF_ERROR(api.Validate());
  int count = 0;
  const absl::Status counted =
      CudaStatus(api, api.GetDeviceCount(&count), "counting the CUDA devices");
  if (counted.ok() && count > 0) return count;
  if (counted.ok() || absl::IsNotFound(counted)) {
    return absl::NotFoundError(
        absl::StrCat("no CUDA device: install an NVIDIA driver for CUDA ", CUDART_VERSION / 1000,
                     " and check nvidia-smi and CUDA_VISIBLE_DEVICES, or use the emulated device",
                     counted.ok() ? "" : absl::StrCat(" (", counted.message(), ")")));
  }
  return counted;
}

}  // namespace pinion
