// Makes Pinion use the CUDA devices of this process.
//
//   PINION_ASSIGN_OR_RETURN(auto session, OffloadSession::Create({}, CudaBackend()));
//
// Calls leave the thread's current device unchanged. A device's calls create no context on another
// device.
//
// Thread safety: a backend is a value that any thread may use; its devices are thread-safe.
// Ownership: devices are shared, and may outlive the backend.

#ifndef PINION_DEVICE_CUDA_CUDA_BACKEND_H_
#define PINION_DEVICE_CUDA_CUDA_BACKEND_H_

#include "absl/status/statusor.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/device_backend.h"

namespace pinion {

// Returns a backend with type_name "cuda". `api` outlives the backend and its devices.
DeviceBackend CudaBackend(const CudaApi& api = RealCudaApi());

// Returns the number of CUDA devices, at least 1. NotFound: no driver, or no device.
// InvalidArgument: a function of `api` is null.
absl::StatusOr<int> CudaDeviceCount(const CudaApi& api = RealCudaApi());

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_CUDA_BACKEND_H_
