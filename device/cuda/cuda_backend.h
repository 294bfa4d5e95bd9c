// The CUDA devices of this process, for the layers above.
//
//   PINION_ASSIGN_OR_RETURN(auto session, OffloadSession::Create({}, CudaBackend()));
//
// Every call leaves the thread's current device as it was, and makes no context on any device but
// its own.
//
// Thread safety: a backend is a value, which any thread may use; its devices are thread-safe.
// Ownership: devices are shared, and may outlive the backend.

#ifndef PINION_DEVICE_CUDA_CUDA_BACKEND_H_
#define PINION_DEVICE_CUDA_CUDA_BACKEND_H_

#include "absl/status/statusor.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/device_backend.h"

namespace pinion {

// type_name "cuda". `api` outlives the backend and its devices.
DeviceBackend CudaBackend(const CudaApi& api = RealCudaApi());

// How many devices there are, at least 1. NotFound says what is missing: the driver, or a device.
absl::StatusOr<int> CudaDeviceCount(const CudaApi& api = RealCudaApi());

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_CUDA_BACKEND_H_
