// cudaError_t -> absl::Status, in one place.

#ifndef PINION_DEVICE_CUDA_CUDA_STATUS_H_
#define PINION_DEVICE_CUDA_CUDA_STATUS_H_

#include <string>

#include "absl/status/status.h"
#include "pinion/device/cuda/cuda_api.h"

namespace pinion {

// OkStatus for cudaSuccess. Otherwise a status by device.h's table of codes, saying
// "<what>: <name> (<text>)", and the runtime's record of the error on this thread is cleared: a
// recoverable error that stays latched is blamed on the next unrelated kernel launch. Errors that
// are sticky, or that nobody knows to be harmless, are Internal.
absl::Status CudaStatus(const CudaApi& api, cudaError_t error, const std::string& what);

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_CUDA_STATUS_H_
