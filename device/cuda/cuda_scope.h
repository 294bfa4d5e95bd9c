// Scopes that change the calling thread's CUDA state for one call and then restore it.

#ifndef PINION_DEVICE_CUDA_CUDA_SCOPE_H_
#define PINION_DEVICE_CUDA_CUDA_SCOPE_H_

#include "absl/status/status.h"
#include "pinion/device/cuda/cuda_api.h"

namespace pinion {

// Makes a device current. status() tells whether that worked.
//
// Restoring by cudaSetDevice would create a context on a previous device that has none yet. On a
// thread that never chose a device this would cost some hundred MiB of device 0, per rank of a
// host. In that case the scope pushes the new device's context instead, and the destructor pops it.
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

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_CUDA_SCOPE_H_
