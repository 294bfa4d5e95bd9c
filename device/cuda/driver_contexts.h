// Contexts of devices, by the CUDA driver: the runtime has no such calls (CudaApi says what they
// do).
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
  // `lookup` finds a function of the driver by its name, or null: nothing links libcuda, which a
  // machine without a GPU does not have. Where one is missing, calls return cudaErrorNotSupported.
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
  // Retained once and never released: the runtime, too, keeps what it has used.
  std::atomic<CUcontext> contexts_[kDevices];
};

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_DRIVER_CONTEXTS_H_
