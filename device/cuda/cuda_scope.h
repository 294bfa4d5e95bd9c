// What a call changes on the calling thread and puts back when it is done.

#ifndef PINION_DEVICE_CUDA_CUDA_SCOPE_H_
#define PINION_DEVICE_CUDA_CUDA_SCOPE_H_

#include "absl/status/status.h"
#include "pinion/device/cuda/cuda_api.h"

namespace pinion {

// Makes a device current. status() says whether that worked.
//
// cudaSetDevice makes a context on the device, some hundred MiB of its memory, if it has none yet:
// to put device 0 back on a thread that never chose one would cost each rank of a host that much
// of device 0. A device without a context cannot have been chosen, so the thread's own state is
// left alone then: the driver pushes a context on top of it, and pops it again.
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

// Lets this thread make the calls that CUDA calls potentially unsafe while another stream captures
// a graph in the "global" mode, which would otherwise refuse the call and spoil the capture.
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

// Makes the device's primary context current. A program may have a green context current, and a
// stream that is created then is destroyed with that context. Best effort: without the driver's
// functions nothing happens.
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
