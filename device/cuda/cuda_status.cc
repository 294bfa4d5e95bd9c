#include "pinion/device/cuda/cuda_status.h"

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

}  // namespace pinion
