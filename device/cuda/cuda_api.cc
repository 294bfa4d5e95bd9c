#include "pinion/device/cuda/cuda_api.h"

#include "pinion/device/cuda/memcpy_batch.h"

namespace pinion {
namespace {

cudaError_t MemcpyBatch(void* const* dsts, const void* const* srcs, const size_t* sizes,
                        size_t count, cudaStream_t stream) {
  return MemcpyBatchInStreamOrder(&cudaMemcpyBatchAsync, dsts, srcs, sizes, count, stream);
}

}  // namespace

const CudaApi& RealCudaApi() {
  static constexpr CudaApi api = {
      .GetDeviceCount = &cudaGetDeviceCount,
      .GetDevice = &cudaGetDevice,
      .SetDevice = &cudaSetDevice,
      .DeviceGetAttribute = &cudaDeviceGetAttribute,
      .DeviceGetPCIBusId = &cudaDeviceGetPCIBusId,
      .GetDeviceProperties = &cudaGetDeviceProperties,
      .ThreadExchangeStreamCaptureMode = &cudaThreadExchangeStreamCaptureMode,
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
      .MemcpyBatchAsync = &MemcpyBatch,
      .LibraryLoadData = &cudaLibraryLoadData,
      .LibraryGetKernel = &cudaLibraryGetKernel,
      .LibraryUnload = &cudaLibraryUnload,
      .LaunchKernel = &cudaLaunchKernel,
  };
  return api;
}

}  // namespace pinion
