#include "pinion/device/cuda/cuda_api.h"

namespace pinion {
namespace {

#if CUDART_VERSION >= 12080
cudaError_t BatchInStreamOrder(void* const* dsts, const void* const* srcs, const size_t* sizes,
                               size_t count, cudaStream_t stream) {
  // Not "any order": what a copy out reads may have been written a moment ago by the work that the
  // stream has just waited for.
  cudaMemcpyAttributes in_stream_order = {};
  in_stream_order.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first_piece = 0;
#if CUDART_VERSION >= 13000
  return cudaMemcpyBatchAsync(dsts, srcs, sizes, count, &in_stream_order, &first_piece, 1, stream);
#else
  size_t failed_piece = 0;
  return cudaMemcpyBatchAsync(const_cast<void**>(dsts), const_cast<void**>(srcs),
                              const_cast<size_t*>(sizes), count, &in_stream_order, &first_piece, 1,
                              &failed_piece, stream);
#endif
}
#endif

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
#if CUDART_VERSION >= 12080
    .MemcpyBatchAsync = &BatchInStreamOrder,
#else
    .MemcpyBatchAsync = nullptr,
#endif
  };
  return api;
}

}  // namespace pinion
