// Queries and switches CUDA contexts by the driver API; CudaApi documents the calls.
//
// Thread safety: thread-safe.

#ifndef PINION_DEVICE_CUDA_DRIVER_CONTEXTS_H_
#define PINION_DEVICE_CUDA_DRIVER_CONTEXTS_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>

namespace pinion {

class DriverContexts {
 public:
  // `lookup` returns a driver function by name, or null. Looking functions up avoids linking
  // libcuda, which machines without a GPU lack. If a function is missing, calls return
  // cudaErrorNotSupported.
  explicit DriverContexts(void* (*lookup)(const char* name));
  DriverContexts(const DriverContexts&) = delete;
  DriverContexts& operator=(const DriverContexts&) = delete;

  cudaError_t HasContext(int device, bool* has_context) const;
  cudaError_t PushContext(int device);
  cudaError_t PopContext() const;

 private:
  static constexpr int kDevices = 64;

  decltype(&cuInit) init_;
  decltype(&cuDevicePrimaryCtxGetState) get_state_;
  decltype(&cuDevicePrimaryCtxRetain) retain_;
  decltype(&cuCtxPushCurrent) push_;
  decltype(&cuCtxPopCurrent) pop_;
  bool usable_;
  // Retained once and never released, as in the runtime.
  std::atomic<CUcontext> contexts_[kDevices];
};

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_DRIVER_CONTEXTS_H_
