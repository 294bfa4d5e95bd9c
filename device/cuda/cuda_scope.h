// What a call changes on the calling thread and puts back when it is done.

#ifndef PINION_DEVICE_CUDA_CUDA_SCOPE_H_
#define PINION_DEVICE_CUDA_CUDA_SCOPE_H_

#include "absl/status/status.h"
#include "pinion/device/cuda/cuda_api.h"

namespace pinion {

// Makes a device current. status() says whether that worked.
//
// Restoring device 0 on a thread that never used it makes CUDA open a context there (some hundred
// MiB of its memory). The runtime does not tell: cudaGetDevice says 0 for a thread that never chose
// as well, and not to restore would break the thread that did choose. Select the device first
// (cudaSetDevice, or CUDA_VISIBLE_DEVICES), as multi-GPU programs do.
class CudaDeviceScope {
 public:
  CudaDeviceScope(const CudaApi& api, int index);
  ~CudaDeviceScope();
  CudaDeviceScope(const CudaDeviceScope&) = delete;
  CudaDeviceScope& operator=(const CudaDeviceScope&) = delete;

  const absl::Status& status() const { return status_; }

 private:
  const CudaApi& api_;
  int previous_ = -1;
  bool restore_ = false;
  absl::Status status_;
};

// Lets this thread query events and pin memory while another stream captures a graph in the
// "global" mode, which would otherwise refuse the call and spoil the capture.
class RelaxedCaptureScope {
 public:
  explicit RelaxedCaptureScope(const CudaApi& api);
  ~RelaxedCaptureScope();
  RelaxedCaptureScope(const RelaxedCaptureScope&) = delete;
  RelaxedCaptureScope& operator=(const RelaxedCaptureScope&) = delete;

 private:
  const CudaApi& api_;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_CUDA_SCOPE_H_
