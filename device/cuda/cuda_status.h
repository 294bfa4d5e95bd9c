// Converts cudaError_t to absl::Status, and queries attributes of devices.

#ifndef PINION_DEVICE_CUDA_CUDA_STATUS_H_
#define PINION_DEVICE_CUDA_CUDA_STATUS_H_

#include <string>

#include "absl/status/status.h"
#include "pinion/device/cuda/cuda_api.h"

namespace pinion {

// Returns OkStatus for cudaSuccess, else a status by device.h's table of codes: "<what>: <name>
// (<text>)". Sticky and unknown errors are Internal. Also clears the runtime's latched error of
// this thread, which CUDA would otherwise report at the next unrelated kernel launch.
absl::Status CudaStatus(const CudaApi& api, cudaError_t error, const std::string& what);

// Returns whether a device has the attribute; false if CUDA does not tell.
bool HasAttribute(const CudaApi& api, int index, cudaDeviceAttr attribute);

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_CUDA_STATUS_H_
