// Helpers for calls of CUDA. They convert errors, and change the calling thread's CUDA state for
// one call and restore it.
//
//   const CudaDeviceScope scope(api, index);
//   PINION_RETURN_IF_ERROR(scope.status());
//   PINION_RETURN_IF_ERROR(CudaStatus(api, api.FreeHost(data), "cudaFreeHost"));
//
// Thread safety: thread-safe; a scope belongs to its thread.

#ifndef PINION_DEVICE_CUDA_CUDA_CALLS_H_
#define PINION_DEVICE_CUDA_CUDA_CALLS_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <atomic>
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

// Permits calls that CUDA considers potentially unsafe while another stream captures a graph in
// "global" mode. Without this scope CUDA would refuse the call and invalidate the capture.
class [[nodiscard]] RelaxedCaptureScope {
 public:
  [[nodiscard]] explicit RelaxedCaptureScope(const CudaApi& api);
  ~RelaxedCaptureScope();
  RelaxedCaptureScope(const RelaxedCaptureScope&) = delete;
  RelaxedCaptureScope& operator=(const RelaxedCaptureScope&) = delete;

 private:
  const CudaApi& api_;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  const bool is_relaxed_;
};

// Makes a device current. status() tells whether that worked.
//
// Pushes the device's context, and the destructor pops it. Exception: if the driver's functions are
// missing, the scope selects the device and then the previous one by cudaSetDevice. That creates a
// context on a previous device that has none, which costs some hundred MiB of device memory. It
// also replaces a green context of the thread.
//
// Creates a context on a device without one, which breaks no capture.
class [[nodiscard]] CudaDeviceScope {
 public:
  [[nodiscard]] CudaDeviceScope(const CudaApi& api, int index);
  ~CudaDeviceScope();
  CudaDeviceScope(const CudaDeviceScope&) = delete;
  CudaDeviceScope& operator=(const CudaDeviceScope&) = delete;

  const absl::Status& status() const { return status_; }

 private:
  enum class Restore { kNothing, kDevice, kContext };

  const CudaApi& api_;
  int previous_ = -1;
  Restore restore_ = Restore::kNothing;
  absl::Status status_;
};

// Makes the device's primary context current for creating a stream or an event. A stream created
// under a program's green context would be destroyed with that context. An event can only be
// recorded on a stream of its own context. Best effort: does nothing if the driver's functions are
// missing.
class [[nodiscard]] PrimaryContextScope {
 public:
  [[nodiscard]] PrimaryContextScope(const CudaApi& api, int index)
      : api_(api), is_pushed_(api.PushContext(index) == cudaSuccess) {}
  ~PrimaryContextScope() {
    if (is_pushed_) api_.PopContext();
  }
  PrimaryContextScope(const PrimaryContextScope&) = delete;
  PrimaryContextScope& operator=(const PrimaryContextScope&) = delete;

 private:
  const CudaApi& api_;
  const bool is_pushed_;
};

// Switches CUDA contexts by the driver API; CudaApi documents the calls.
class DriverContexts {
 public:
  // `lookup` returns a driver function by name, or null. Looking functions up avoids linking
  // libcuda, which machines without a GPU lack. If a function is missing, calls return
  // cudaErrorNotSupported.
  explicit DriverContexts(void* (*lookup)(const char* name));
  DriverContexts(const DriverContexts&) = delete;
  DriverContexts& operator=(const DriverContexts&) = delete;

  cudaError_t PushContext(int device);
  cudaError_t PopContext() const;

 private:
  static constexpr int kDevices = 64;

  decltype(&cuInit) init_;
  decltype(&cuDevicePrimaryCtxRetain) retain_;
  decltype(&cuCtxPushCurrent) push_;
  decltype(&cuCtxPopCurrent) pop_;
  bool usable_;
  // Retained once and never released, as in the runtime.
  std::atomic<CUcontext> contexts_[kDevices];
};

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_CUDA_CALLS_H_
