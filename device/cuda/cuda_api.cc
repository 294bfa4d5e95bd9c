#include "pinion/device/cuda/cuda_api.h"

#include <cuda.h>

#include <atomic>
#include <cstdlib>
#include <string_view>

#include "pinion/allocator/base/check.h"
#include "pinion/device/cuda/memcpy_batch.h"

namespace pinion {
namespace {

cudaError_t MemcpyBatch(void* const* dsts, const void* const* srcs, const size_t* sizes,
                        size_t count, cudaStream_t stream) {
  return MemcpyBatchInStreamOrder(&cudaMemcpyBatchAsync, dsts, srcs, sizes, count, stream);
}

// A batch is the least used way of copying in CUDA, and drivers are known that hang in it: whoever
// meets one must not have to build again.
bool CopyLoopAsked() {
  const char* const value = std::getenv("PINION_COPY_LOOP");
  if (value == nullptr || std::string_view(value) != "1") return false;
  PINION_LOG(kWarning) << "PINION_COPY_LOOP=1: pieces are copied one by one, not by "
                          "cudaMemcpyBatchAsync";
  return true;
}

// --- Contexts ---
// The driver's functions come through the runtime, which has loaded it: nothing links libcuda,
// which a machine without a GPU does not have.

template <typename Function>
Function DriverFunction(const char* name) {
  constexpr unsigned int kSince = 7000;  // all of them are older
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &function, kSince, cudaEnableDefault, &found);
  if (error != cudaSuccess) cudaGetLastError();
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<Function>(function);
}

struct DriverContexts {
  decltype(&cuInit) init = DriverFunction<decltype(&cuInit)>("cuInit");
  decltype(&cuDevicePrimaryCtxGetState) get_state =
      DriverFunction<decltype(&cuDevicePrimaryCtxGetState)>("cuDevicePrimaryCtxGetState");
  decltype(&cuDevicePrimaryCtxRetain) retain =
      DriverFunction<decltype(&cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain");
  decltype(&cuCtxPushCurrent) push =
      DriverFunction<decltype(&cuCtxPushCurrent)>("cuCtxPushCurrent");
  decltype(&cuCtxPopCurrent) pop = DriverFunction<decltype(&cuCtxPopCurrent)>("cuCtxPopCurrent");
  bool usable = init != nullptr && get_state != nullptr && retain != nullptr && push != nullptr &&
                pop != nullptr && init(0) == CUDA_SUCCESS;
};

const DriverContexts& Driver() {
  static const DriverContexts driver;
  return driver;
}

// The runtime's codes are the driver's since CUDA 10.1.
cudaError_t RuntimeError(CUresult result) { return static_cast<cudaError_t>(result); }

cudaError_t HasContext(int device, bool* has_context) {
  if (!Driver().usable) return cudaErrorNotSupported;
  unsigned int flags = 0;
  int active = 0;
  const CUresult result = Driver().get_state(device, &flags, &active);
  if (result == CUDA_SUCCESS) *has_context = active != 0;
  return RuntimeError(result);
}

cudaError_t PushContext(int device) {
  if (!Driver().usable) return cudaErrorNotSupported;
  // Retained once and never released: the runtime, too, keeps what it has used.
  constexpr int kDevices = 64;
  static std::atomic<CUcontext> contexts[kDevices];
  if (device >= kDevices) return cudaErrorNotSupported;
  CUcontext context = contexts[device].load(std::memory_order_acquire);
  if (context == nullptr) {
    const CUresult retained = Driver().retain(&context, device);
    if (retained != CUDA_SUCCESS) return RuntimeError(retained);
    contexts[device].store(context, std::memory_order_release);
  }
  return RuntimeError(Driver().push(context));
}

cudaError_t PopContext() {
  CUcontext popped = nullptr;
  return RuntimeError(Driver().pop(&popped));
}

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
      .MemcpyBatchAsync = CopyLoopAsked() ? nullptr : &MemcpyBatch,
      .LibraryLoadData = &cudaLibraryLoadData,
      .LibraryGetKernel = &cudaLibraryGetKernel,
      .LibraryUnload = &cudaLibraryUnload,
      .LaunchKernel = &cudaLaunchKernel,
  };
  return api;
}

}  // namespace pinion
