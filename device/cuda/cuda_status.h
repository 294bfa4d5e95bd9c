// Converts cudaError_t to absl::Status.

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

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_CUDA_STATUS_H_
