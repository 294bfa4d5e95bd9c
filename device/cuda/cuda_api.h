// The part of the CUDA runtime that Pinion uses, as one table of function pointers.
//
// The real files of this folder run against RealCudaApi() on a GPU and, in tests without one,
// against a fake runtime. The real table is bound at link time to the shared runtime that LibTorch
// loads too: the static one would keep a state of its own.

#ifndef PINION_DEVICE_CUDA_CUDA_API_H_
#define PINION_DEVICE_CUDA_CUDA_API_H_

#include <cuda_runtime_api.h>

#include <cstddef>

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

  // Contexts, by the driver: the runtime has no such calls.
  // Whether the device has a context yet; CUDA makes it at first use, and cudaSetDevice counts as
  // one.
  cudaError_t (*HasContext)(int device, bool* has_context);
  // Makes the device's context current on this thread until PopContext, which puts back what was
  // current before, be it nothing.
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
  decltype(&cudaHostRegister) HostRegister;
  decltype(&cudaHostUnregister) HostUnregister;

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
  // All pieces in one call, each source read in the order of the stream. Null: the runtime has no
  // such call, or nobody has asked for it by PINION_COPY_BATCH=1 in the environment.
  cudaError_t (*MemcpyBatchAsync)(void* const* dsts, const void* const* srcs, const size_t* sizes,
                                  size_t count, cudaStream_t stream);

  // Kernels.
  decltype(&cudaLibraryLoadData) LibraryLoadData;
  decltype(&cudaLibraryGetKernel) LibraryGetKernel;
  decltype(&cudaLibraryUnload) LibraryUnload;
  decltype(&cudaLaunchKernel) LaunchKernel;
};

const CudaApi& RealCudaApi();

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_CUDA_API_H_
