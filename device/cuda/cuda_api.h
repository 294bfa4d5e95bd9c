// The CUDA runtime calls that Pinion makes, as a table of function pointers that tests replace.
//
//   CudaDevice device(RealCudaApi(), /*index=*/0);
//
// RealCudaApi() links to the shared runtime that LibTorch loads too: a static runtime would keep a
// state of its own. Tests without a GPU pass the table of a fake runtime instead.

#ifndef PINION_DEVICE_CUDA_CUDA_API_H_
#define PINION_DEVICE_CUDA_CUDA_API_H_

#include <cuda_runtime_api.h>

#include "absl/status/status.h"

namespace pinion {

struct CudaApi {
  // Devices, per host thread.
  decltype(&cudaGetDeviceCount) GetDeviceCount;
  decltype(&cudaGetDevice) GetDevice;
  decltype(&cudaSetDevice) SetDevice;
  decltype(&cudaDeviceGetAttribute) DeviceGetAttribute;
  decltype(&cudaDeviceGetPCIBusId) DeviceGetPCIBusId;
  cudaError_t (*GetDeviceProperties)(cudaDeviceProp* properties, int device);
  decltype(&cudaThreadExchangeStreamCaptureMode) ThreadExchangeStreamCaptureMode;

  // Driver calls on device contexts; the runtime has none. PushContext makes the device's context
  // current on this thread, and creates it at the device's first use. PopContext restores the
  // previous one. cudaErrorNotSupported: the driver has no such functions.
  cudaError_t (*PushContext)(int device);
  cudaError_t (*PopContext)();

  // Errors.
  decltype(&cudaGetLastError) GetLastError;
  decltype(&cudaGetErrorName) GetErrorName;
  decltype(&cudaGetErrorString) GetErrorString;

  // Memory.
  decltype(&cudaMemGetInfo) MemGetInfo;
  decltype(&cudaMallocAsync) MallocAsync;
  decltype(&cudaFreeAsync) FreeAsync;
  decltype(&cudaHostAlloc) HostAlloc;
  decltype(&cudaFreeHost) FreeHost;

  // Streams.
  decltype(&cudaStreamCreateWithFlags) StreamCreateWithFlags;
  decltype(&cudaStreamDestroy) StreamDestroy;
  decltype(&cudaStreamSynchronize) StreamSynchronize;
  decltype(&cudaStreamIsCapturing) StreamIsCapturing;

  // Events.
  decltype(&cudaEventCreateWithFlags) EventCreateWithFlags;
  decltype(&cudaEventDestroy) EventDestroy;
  decltype(&cudaEventRecord) EventRecord;
  decltype(&cudaStreamWaitEvent) StreamWaitEvent;
  decltype(&cudaEventQuery) EventQuery;
  decltype(&cudaEventElapsedTime) EventElapsedTime;

  // Copies.
  decltype(&cudaMemcpyAsync) MemcpyAsync;

  // Returns InvalidArgument unless every function is set.
  absl::Status Validate() const;
};

const CudaApi& RealCudaApi();

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_CUDA_API_H_
