#include "pinion/device/cuda/cuda_scope.h"

#include "absl/strings/str_cat.h"
#include "pinion/device/cuda/cuda_status.h"

namespace pinion {

CudaDeviceScope::CudaDeviceScope(const CudaApi& api, int index) : api_(api) {
  status_ = CudaStatus(api_, api_.GetDevice(&previous_), "cudaGetDevice");
  if (!status_.ok() || previous_ == index) return;
  status_ = CudaStatus(api_, api_.SetDevice(index), absl::StrCat("cudaSetDevice(", index, ")"));
  restore_ = status_.ok();
}

CudaDeviceScope::~CudaDeviceScope() {
  if (restore_) api_.SetDevice(previous_);
}

RelaxedCaptureScope::RelaxedCaptureScope(const CudaApi& api) : api_(api) {
  api_.ThreadExchangeStreamCaptureMode(&mode_);
}

RelaxedCaptureScope::~RelaxedCaptureScope() { api_.ThreadExchangeStreamCaptureMode(&mode_); }

}  // namespace pinion
