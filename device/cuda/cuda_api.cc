#include "pinion/device/cuda/cuda_api.h"

#include <cstdlib>

#include "absl/strings/numbers.h"
#include "pinion/allocator/base/check.h"
#include "pinion/device/cuda/driver_contexts.h"
#include "pinion/device/cuda/memcpy_batch.h"

namespace pinion {
namespace {

cudaError_t MemcpyBatch(void* const* dsts, const void* const* srcs, const size_t* sizes,
                        size_t count, cudaStream_t stream) {
  return MemcpyBatchInStreamOrder(&cudaMemcpyBatchAsync, dsts, srcs, sizes, count, stream);
}

// Drivers are known that die in the batch call (docs/maintainers/decisions/0015).
bool CopyBatchAsked() {
  const char* const value = std::getenv("PINION_COPY_BATCH");
  bool asked = false;
  if (value == nullptr || !absl::SimpleAtob(value, &asked) || !asked) return false;
  PINION_LOG(kWarning)
      << "PINION_COPY_BATCH=1: small pieces are copied by cudaMemcpyBatchAsync, in "
         "which drivers have failed";
  return true;
}

// Asks the runtime, which has loaded the driver.
void* DriverFunction(const char* name) {
  constexpr unsigned int kSince = 7000;  // every function that Pinion looks up is older
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, kSince, cudaEnableDefault, &found);
  if (error != cudaSuccess) cudaGetLastError();
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? function : nullptr;
}

DriverContexts& Driver() {
  static DriverContexts driver(&DriverFunction);
  return driver;
}

cudaError_t HasContext(int device, bool* has_context) {
  return Driver().HasContext(device, has_context);
}

cudaError_t PushContext(int device) { return Driver().PushContext(device); }

cudaError_t PopContext() { return Driver().PopContext(); }

}  // namespace

const CudaApi& RealCudaApi() {
  static const CudaApi api = {
      .GetDeviceCount = &cudaGetDeviceCount,
      .GetDevice = &cudaGetDevice,
      .SetDevice = &cudaSetDevice,
      .DeviceGetAttribute = &cudaDeviceGetAttribute,
      .DeviceGetPCIBusId = &cudaDeviceGetPCIBusId,
      .GetDeviceProperties = &cudaGetDeviceProperties,
      .ThreadExchangeStreamCaptureMode = &cudaThreadExchangeStreamCaptureMode,
      .HasContext = &HasContext,
      .PushContext = &PushContext,
      .PopContext = &PopContext,
      .GetLastError = &cudaGetLastError,
      .GetErrorName = &cudaGetErrorName,
      .GetErrorString = &cudaGetErrorString,
      .MemGetInfo = &cudaMemGetInfo,
      .MallocAsync = &cudaMallocAsync,
      .FreeAsync = &cudaFreeAsync,
      .HostAlloc = &cudaHostAlloc,
      .FreeHost = &cudaFreeHost,
      .HostRegister = &cudaHostRegister,
      .HostUnregister = &cudaHostUnregister,
      .StreamCreateWithFlags = &cudaStreamCreateWithFlags,
      .StreamDestroy = &cudaStreamDestroy,
      .StreamSynchronize = &cudaStreamSynchronize,
      .StreamIsCapturing = &cudaStreamIsCapturing,
      .EventCreateWithFlags = &cudaEventCreateWithFlags,
      .EventDestroy = &cudaEventDestroy,
      .EventRecord = &cudaEventRecord,
      .StreamWaitEvent = &cudaStreamWaitEvent,
      .EventQuery = &cudaEventQuery,
      .EventElapsedTime = &cudaEventElapsedTime,
      .MemcpyAsync = &cudaMemcpyAsync,
      .MemcpyBatchAsync = CopyBatchAsked() ? &MemcpyBatch : nullptr,
      .LibraryLoadData = &cudaLibraryLoadData,
      .LibraryGetKernel = &cudaLibraryGetKernel,
      .LibraryUnload = &cudaLibraryUnload,
      .LaunchKernel = &cudaLaunchKernel,
  };
  return api;
}

}  // namespace pinion
