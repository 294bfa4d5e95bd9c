#include "pinion/device/cuda/cuda_api.h"

#include <algorithm>
#include <array>
#include <bit>

#include "absl/strings/str_cat.h"
#include "pinion/device/cuda/cuda_calls.h"

namespace pinion {
namespace {

// Asks the runtime, which has loaded the driver.
void* DriverFunction(const char* name) {
  constexpr unsigned int kSince = 7000;  // every function that Pinion looks up is older
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, kSince, cudaEnableDefault, &found);
  if (error != cudaSuccess) cudaGetLastError();
  return function;  // null unless it was found
}

DriverContexts& Driver() {
  static DriverContexts driver(&DriverFunction);
  return driver;
}

}  // namespace

absl::Status CudaApi::Validate() const {
  // The table holds nothing but pointers to functions.
  const auto functions = std::bit_cast<std::array<void*, sizeof(CudaApi) / sizeof(void*)>>(*this);
  const auto missing = std::count(functions.begin(), functions.end(), nullptr);
  if (missing == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      missing,
      " functions of CudaApi are null: pass RealCudaApi(), or a copy of it in which some "
      "functions are others"));
}

const CudaApi& RealCudaApi() {
  static const CudaApi api = {
      .GetDeviceCount = &cudaGetDeviceCount,
      .GetDevice = &cudaGetDevice,
      .SetDevice = &cudaSetDevice,
      .DeviceGetAttribute = &cudaDeviceGetAttribute,
      .DeviceGetPCIBusId = &cudaDeviceGetPCIBusId,
      .GetDeviceProperties = &cudaGetDeviceProperties,
      .ThreadExchangeStreamCaptureMode = &cudaThreadExchangeStreamCaptureMode,
      .PushContext = [](int device) { return Driver().PushContext(device); },
      .PopContext = [] { return Driver().PopContext(); },
      .GetLastError = &cudaGetLastError,
      .GetErrorName = &cudaGetErrorName,
      .GetErrorString = &cudaGetErrorString,
      .MemGetInfo = &cudaMemGetInfo,
      .MallocAsync = &cudaMallocAsync,
      .FreeAsync = &cudaFreeAsync,
      .HostAlloc = &cudaHostAlloc,
      .FreeHost = &cudaFreeHost,
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
  };
  return api;
}

}  // namespace pinion
