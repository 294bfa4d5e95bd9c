#include "pinion/device/cuda/cuda_scope.h"

#include "absl/strings/str_cat.h"
#include "pinion/device/cuda/cuda_status.h"

namespace pinion {

CudaDeviceScope::CudaDeviceScope(const CudaApi& api, int index) : api_(api) {
  status_ = CudaStatus(api_, api_.GetDevice(&previous_), "cudaGetDevice");
  if (!status_.ok() || previous_ == index) return;
  bool has_context = true;
  if (api_.HasContext(previous_, &has_context) == cudaSuccess && !has_context) {
    status_ = CudaStatus(api_, api_.PushContext(index),
                         absl::StrCat("making the context of cuda:", index, " current"));
    if (status_.ok()) restore_ = Restore::kContext;
    return;
  }
  status_ = CudaStatus(api_, api_.SetDevice(index), absl::StrCat("cudaSetDevice(", index, ")"));
  if (status_.ok()) restore_ = Restore::kDevice;
}

CudaDeviceScope::~CudaDeviceScope() {
  switch (restore_) {
    case Restore::kNothing:
      break;
    case Restore::kDevice:
      api_.SetDevice(previous_);
      break;
    case Restore::kContext:
      api_.PopContext();
      break;
  }
}

RelaxedCaptureScope::RelaxedCaptureScope(const CudaApi& api)
    : api_(api), is_relaxed_(api.ThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess) {}

RelaxedCaptureScope::~RelaxedCaptureScope() {
  if (is_relaxed_) api_.ThreadExchangeStreamCaptureMode(&mode_);
}

}  // namespace pinion
