#include "pinion/device/cuda/driver_contexts.h"

namespace pinion {
namespace {

// Runtime and driver share their error codes since CUDA 10.1.
cudaError_t RuntimeError(CUresult result) { return static_cast<cudaError_t>(result); }

}  // namespace

DriverContexts::DriverContexts(void* (*lookup)(const char* name))
    : init_(reinterpret_cast<decltype(init_)>(lookup("cuInit"))),
      get_state_(reinterpret_cast<decltype(get_state_)>(lookup("cuDevicePrimaryCtxGetState"))),
      retain_(reinterpret_cast<decltype(retain_)>(lookup("cuDevicePrimaryCtxRetain"))),
      push_(reinterpret_cast<decltype(push_)>(lookup("cuCtxPushCurrent"))),
      pop_(reinterpret_cast<decltype(pop_)>(lookup("cuCtxPopCurrent"))),
      usable_(init_ != nullptr && get_state_ != nullptr && retain_ != nullptr && push_ != nullptr &&
              pop_ != nullptr && init_(0) == CUDA_SUCCESS) {}

cudaError_t DriverContexts::HasContext(int device, bool* has_context) const {
  if (!usable_) return cudaErrorNotSupported;
  unsigned int flags;
  int active;
  const CUresult result = get_state_(device, &flags, &active);
  if (result == CUDA_SUCCESS) *has_context = active != 0;
  return RuntimeError(result);
}

cudaError_t DriverContexts::PushContext(int device) {
  if (!usable_ || device >= kDevices) return cudaErrorNotSupported;
  CUcontext context = contexts_[device].load(std::memory_order_acquire);
  if (context == nullptr) {
    const CUresult retained = retain_(&context, device);
    if (retained != CUDA_SUCCESS) return RuntimeError(retained);
    contexts_[device].store(context, std::memory_order_release);
  }
  return RuntimeError(push_(context));
}

cudaError_t DriverContexts::PopContext() const {
  CUcontext popped;
  return RuntimeError(pop_(&popped));
}

}  // namespace pinion
