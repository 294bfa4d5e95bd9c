#include "pinion/device/cuda/cuda_calls.h"

#include "absl/strings/str_cat.h"

namespace pinion {
namespace {

absl::StatusCode CodeOf(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
    case cudaErrorOperatingSystem:  // page locking refused: ulimit -l, or no lockable memory
      return absl::StatusCode::kResourceExhausted;

    case cudaErrorNotReady:
    case cudaErrorDevicesUnavailable:
    case cudaErrorSystemNotReady:
    case cudaErrorMpsServerNotReady:
    case cudaErrorMpsMaxClientsReached:
    case cudaErrorMpsMaxConnectionsReached:
      return absl::StatusCode::kUnavailable;

    case cudaErrorInvalidValue:
    case cudaErrorInvalidHostPointer:
    case cudaErrorInvalidDevicePointer:
    case cudaErrorInvalidMemcpyDirection:
    case cudaErrorInvalidDevice:
    case cudaErrorInvalidResourceHandle:
      return absl::StatusCode::kInvalidArgument;

    case cudaErrorNotPermitted:
    case cudaErrorNotSupported:
    case cudaErrorInvalidKernelImage:
    case cudaErrorInvalidPtx:
    case cudaErrorJitCompilationDisabled:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorSymbolNotFound:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorCallRequiresNewerDriver:  // only this call; older calls work
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureMerge:
    case cudaErrorStreamCaptureUnmatched:
    case cudaErrorStreamCaptureUnjoined:
    case cudaErrorStreamCaptureIsolation:
    case cudaErrorStreamCaptureImplicit:
    case cudaErrorCapturedEvent:
    case cudaErrorStreamCaptureWrongThread:
      return absl::StatusCode::kFailedPrecondition;

    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorStubLibrary:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
      return absl::StatusCode::kNotFound;

    default:
      return absl::StatusCode::kInternal;
  }
}

// Runtime and driver share their error codes since CUDA 10.1.
cudaError_t RuntimeError(CUresult result) { return static_cast<cudaError_t>(result); }

}  // namespace

absl::Status CudaStatus(const CudaApi& api, cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return absl::OkStatus();
  api.GetLastError();  // clears it; a sticky error is reported again by the next call
  return absl::Status(CodeOf(error), absl::StrCat(what, ": ", api.GetErrorName(error), " (",
                                                  api.GetErrorString(error), ")"));
}

bool HasAttribute(const CudaApi& api, int index, cudaDeviceAttr attribute) {
  int value = 0;
  const cudaError_t error = api.DeviceGetAttribute(&value, attribute, index);
  return CudaStatus(api, error, "cudaDeviceGetAttribute").ok() && value != 0;
}

CudaDeviceScope::CudaDeviceScope(const CudaApi& api, int index) : api_(api) {
  status_ = CudaStatus(api_, api_.GetDevice(&previous_), "cudaGetDevice");
  if (!status_.ok() || previous_ == index) return;
  const RelaxedCaptureScope relaxed(api_);  // the device may get its context now
  const cudaError_t pushed = api_.PushContext(index);
  // A text may throw, so only an error gets one: a thrown constructor restores nothing.
  if (pushed == cudaSuccess) {
    restore_ = Restore::kContext;
  } else if (pushed != cudaErrorNotSupported) {
    status_ =
        CudaStatus(api_, pushed, absl::StrCat("making the context of cuda:", index, " current"));
  } else if (const cudaError_t error = api_.SetDevice(index); error == cudaSuccess) {
    restore_ = Restore::kDevice;
  } else {
    status_ = CudaStatus(api_, error, absl::StrCat("cudaSetDevice(", index, ")"));
  }
}

CudaDeviceScope::~CudaDeviceScope() {
  switch (restore_) {
    case Restore::kNothing:
      break;
    case Restore::kDevice: {
      const RelaxedCaptureScope relaxed(api_);  // the previous device may get its context now
      api_.SetDevice(previous_);
      break;
    }
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

DriverContexts::DriverContexts(void* (*lookup)(const char* name))
    : init_(reinterpret_cast<decltype(init_)>(lookup("cuInit"))),
      retain_(reinterpret_cast<decltype(retain_)>(lookup("cuDevicePrimaryCtxRetain"))),
      push_(reinterpret_cast<decltype(push_)>(lookup("cuCtxPushCurrent"))),
      pop_(reinterpret_cast<decltype(pop_)>(lookup("cuCtxPopCurrent"))),
      usable_(init_ != nullptr && retain_ != nullptr && push_ != nullptr && pop_ != nullptr &&
              init_(0) == CUDA_SUCCESS) {}

cudaError_t DriverContexts::PushContext(int device) {
  if (!usable_ || device < 0 || device >= kDevices) return cudaErrorNotSupported;
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
