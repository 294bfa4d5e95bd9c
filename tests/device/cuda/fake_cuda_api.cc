// Functions of the fake runtime. Its state is in fake_cuda.cc.

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/check.h"
#include "pinion/tests/device/cuda/fake_cuda.h"

namespace pinion::testing {
namespace {

// Returns the error, if it is one, from the calling function.
#define FAKE_CUDA_RETURN_IF_ERROR(expression) \
  if (const cudaError_t error = (expression); error != cudaSuccess) return error

bool HasDevice(FakeCuda& fake, int device) {
  return device >= 0 && device < fake.machine().device_count();
}

cudaError_t GetDeviceCount(int* count) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_RETURN_IF_ERROR(fake.Enter("GetDeviceCount", /*uses_device=*/false));
  if (fake.no_driver()) return fake.Latch(cudaErrorInsufficientDriver);
  *count = fake.machine().device_count();
  return cudaSuccess;
}

cudaError_t GetDevice(int* device) {
  FAKE_CUDA_RETURN_IF_ERROR(FakeCuda::Get().EnterThread("GetDevice"));
  *device = FakeCuda::thread().device();
  return cudaSuccess;
}

cudaError_t SetDevice(int device) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_RETURN_IF_ERROR(fake.EnterThread("SetDevice"));
  if (!HasDevice(fake, device)) return fake.Latch(cudaErrorInvalidDevice);
  // A test that makes PopContext fail leaves the context pushed.
  PINION_CHECK(FakeCuda::thread().pushed.empty() || fake.failed_function() == "PopContext")
      << "SetDevice under a pushed context";
  if (const cudaError_t error = fake.AddContext(device); error != cudaSuccess) {
    return fake.Latch(error);
  }
  FakeCuda::thread().selected = device;
  FakeCuda::thread().has_green_context = false;
  return cudaSuccess;
}

cudaError_t PushContext(int device) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_RETURN_IF_ERROR(fake.EnterDriver("PushContext"));
  if (!HasDevice(fake, device)) return cudaErrorInvalidDevice;  // the driver latches nothing
  FAKE_CUDA_RETURN_IF_ERROR(fake.AddContext(device));
  FakeCuda::thread().pushed.push_back(device);
  return cudaSuccess;
}

cudaError_t PopContext() {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_RETURN_IF_ERROR(fake.EnterDriver("PopContext"));
  PINION_CHECK(!FakeCuda::thread().pushed.empty());
  FakeCuda::thread().pushed.pop_back();
  return cudaSuccess;
}

cudaError_t DeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_RETURN_IF_ERROR(fake.Enter("DeviceGetAttribute", /*uses_device=*/false));
  if (!HasDevice(fake, device)) return fake.Latch(cudaErrorInvalidDevice);
  *value = 0;
  if (attribute == cudaDevAttrPageableMemoryAccessUsesHostPageTables) {
    *value = fake.ReadsHostPageTables(device);
  } else if (attribute == cudaDevAttrIntegrated) {
    *value = fake.integrated();
  }
  return cudaSuccess;
}

cudaError_t DeviceGetPCIBusId(char* text, int size_bytes, int device) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_RETURN_IF_ERROR(fake.Enter("DeviceGetPCIBusId", /*uses_device=*/false));
  if (fake.bus_id(device).empty()) return fake.Latch(cudaErrorInvalidDevice);
  std::snprintf(text, size_bytes, "%s", fake.bus_id(device).c_str());
  return cudaSuccess;
}

cudaError_t GetDeviceProperties(cudaDeviceProp* properties, int device) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_RETURN_IF_ERROR(fake.Enter("GetDeviceProperties", /*uses_device=*/false));
  if (!HasDevice(fake, device)) return fake.Latch(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "%s",
                fake.machine().device(device)->info().model.c_str());
  const std::string name = properties->name;
  properties->major = name.find("B200") != std::string::npos   ? 10
                      : name.find("A100") != std::string::npos ? 8
                                                               : 9;
  return cudaSuccess;
}

cudaError_t ThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  FAKE_CUDA_RETURN_IF_ERROR(FakeCuda::Get().TakeNext("ThreadExchangeStreamCaptureMode"));
  std::swap(*mode, FakeCuda::thread().capture_mode);
  return cudaSuccess;
}

cudaError_t GetLastError() {
  const cudaError_t error = FakeCuda::thread().last_error;
  if (!FakeCuda::IsSticky(error)) FakeCuda::thread().last_error = cudaSuccess;
  return error;
}

cudaError_t MemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_RETURN_IF_ERROR(fake.EnterUnsafe("MemGetInfo"));
  const MemoryStats stats = fake.machine().memory_stats(FakeCuda::thread().device());
  *free_bytes = stats.limit_bytes - stats.in_use_bytes;
  *total_bytes = stats.limit_bytes;
  return cudaSuccess;
}

cudaError_t MallocAsync(void** data, size_t size_bytes, cudaStream_t stream) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_RETURN_IF_ERROR(fake.EnterUnsafe("MallocAsync"));
  FAKE_CUDA_RETURN_IF_ERROR(fake.UseLegacy(stream));
  // CUDA documents no error for a size that exceeds every device.
  const int device = FakeCuda::thread().device();
  if (size_bytes / 1024 > fake.machine().memory_stats(device).limit_bytes) {
    return fake.Latch(cudaErrorInvalidValue);
  }
  const absl::StatusOr<void*> allocated = fake.current().Allocate(size_bytes, fake.Stream(stream));
  if (allocated.ok()) *data = *allocated;
  return fake.Latch(allocated.status());
}

cudaError_t FreeAsync(void* data, cudaStream_t stream) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_RETURN_IF_ERROR(fake.EnterUnsafe("FreeAsync"));
  FAKE_CUDA_RETURN_IF_ERROR(fake.UseLegacy(stream));
  return fake.Latch(fake.current().Free(data, fake.Stream(stream)));
}

cudaError_t HostAlloc(void** data, size_t size_bytes, unsigned int flags) {
  FakeCuda& fake = FakeCuda::Get();
  PINION_CHECK(flags == cudaHostAllocPortable) << "not usable by every device: " << flags;
  FAKE_CUDA_RETURN_IF_ERROR(fake.EnterUnsafe("HostAlloc"));
  return fake.Latch(fake.HostAlloc(data, size_bytes));
}

cudaError_t FreeHost(void* data) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_RETURN_IF_ERROR(fake.EnterUnsafe("FreeHost"));
  return fake.Latch(fake.FreeHost(data));
}

cudaError_t StreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_RETURN_IF_ERROR(fake.EnterUnsafe("StreamCreateWithFlags"));
  PINION_CHECK(flags == cudaStreamNonBlocking) << "a stream that waits for the legacy one";
  const absl::StatusOr<cudaStream_t> created = fake.CreateStream();
  if (created.ok()) *stream = *created;
  return fake.Latch(created.status());
}

cudaError_t StreamDestroy(cudaStream_t stream) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_RETURN_IF_ERROR(fake.EnterUnsafe("StreamDestroy"));
  return fake.Latch(fake.DestroyStream(stream));
}

cudaError_t StreamSynchronize(cudaStream_t stream) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_RETURN_IF_ERROR(fake.EnterUnsafe("StreamSynchronize"));
  FAKE_CUDA_RETURN_IF_ERROR(fake.UseLegacy(stream));
  return fake.Latch(fake.current().SynchronizeStream(fake.Stream(stream)));
}

cudaError_t StreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_RETURN_IF_ERROR(fake.Enter("StreamIsCapturing"));
  if (const cudaError_t error = fake.CheckLegacy(stream); error != cudaSuccess) {
    return fake.Latch(error);
  }
  const absl::StatusOr<bool> capturing = fake.current().IsCapturing(fake.Stream(stream));
  if (capturing.ok()) {
    *status = *capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  }
  return fake.Latch(capturing.status());
}

cudaError_t EventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_RETURN_IF_ERROR(fake.EnterUnsafe("EventCreateWithFlags"));
  PINION_CHECK(flags == cudaEventDisableTiming || flags == cudaEventDefault) << flags;
  const absl::StatusOr<EventHandle> created =
      flags == cudaEventDefault ? fake.current().CreateTimedEvent() : fake.current().CreateEvent();
  if (created.ok()) {
    *event = static_cast<cudaEvent_t>(created->native());
    fake.AddEvent(*event);
  }
  return fake.Latch(created.status());
}

cudaError_t EventDestroy(cudaEvent_t event) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_RETURN_IF_ERROR(fake.EnterUnsafe("EventDestroy"));
  return fake.Latch(fake.DestroyEvent(event));
}

cudaError_t EventRecord(cudaEvent_t event, cudaStream_t stream) {
  FakeCuda& fake = FakeCuda::Get();
  bool lost = false;
  FAKE_CUDA_RETURN_IF_ERROR(fake.EnterSubmission("EventRecord", &lost));
  if (lost) return cudaSuccess;
  FAKE_CUDA_RETURN_IF_ERROR(fake.UseLegacy(stream));
  if (!fake.HaveOneContext(event, stream)) return fake.Latch(cudaErrorInvalidResourceHandle);
  return fake.Latch(fake.current().RecordEvent(fake.Event(event), fake.Stream(stream)));
}

cudaError_t StreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
  FakeCuda& fake = FakeCuda::Get();
  bool lost = false;
  FAKE_CUDA_RETURN_IF_ERROR(fake.EnterSubmission("StreamWaitEvent", &lost));
  if (lost) return cudaSuccess;
  FAKE_CUDA_RETURN_IF_ERROR(fake.UseLegacy(stream));
  PINION_CHECK(flags == cudaEventWaitDefault);
  return fake.Latch(fake.current().StreamWaitEvent(fake.Stream(stream), fake.Event(event)));
}

cudaError_t EventQuery(cudaEvent_t event) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_RETURN_IF_ERROR(fake.EnterUnsafe("EventQuery"));
  const absl::StatusOr<bool> done = fake.current().QueryEvent(fake.Event(event));
  if (done.ok() && !*done) return fake.Latch(cudaErrorNotReady);
  return fake.Latch(done.status());
}

cudaError_t EventElapsedTime(float* elapsed_ms, cudaEvent_t start, cudaEvent_t end) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_RETURN_IF_ERROR(fake.EnterUnsafe("EventElapsedTime"));
  const absl::StatusOr<double> elapsed =
      fake.current().ElapsedMs(fake.Event(start), fake.Event(end));
  if (absl::IsUnavailable(elapsed.status())) return fake.Latch(cudaErrorNotReady);
  if (elapsed.ok()) *elapsed_ms = static_cast<float>(*elapsed);
  return fake.Latch(elapsed.status());
}

cudaError_t MemcpyAsync(void* dst, const void* src, size_t size_bytes, cudaMemcpyKind kind,
                        cudaStream_t stream) {
  FakeCuda& fake = FakeCuda::Get();
  bool lost = false;
  FAKE_CUDA_RETURN_IF_ERROR(fake.EnterCopy("MemcpyAsync", &lost));
  if (lost) return cudaSuccess;
  FAKE_CUDA_RETURN_IF_ERROR(fake.UseLegacy(stream));
  PINION_CHECK(kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToHost);
  const CopyPiece piece = {dst, src, size_bytes};
  return fake.Latch(fake.current().CopyAsync(
      kind == cudaMemcpyHostToDevice ? CopyDirection::kHostToDevice : CopyDirection::kDeviceToHost,
      {&piece, 1}, fake.Stream(stream)));
}

#undef FAKE_CUDA_RETURN_IF_ERROR

}  // namespace

const CudaApi& FakeCuda::Api() {
  static constexpr CudaApi api = {
      .GetDeviceCount = &testing::GetDeviceCount,
      .GetDevice = &testing::GetDevice,
      .SetDevice = &testing::SetDevice,
      .DeviceGetAttribute = &testing::DeviceGetAttribute,
      .DeviceGetPCIBusId = &testing::DeviceGetPCIBusId,
      .GetDeviceProperties = &testing::GetDeviceProperties,
      .ThreadExchangeStreamCaptureMode = &testing::ThreadExchangeStreamCaptureMode,
      .PushContext = &testing::PushContext,
      .PopContext = &testing::PopContext,
      .GetLastError = &testing::GetLastError,
      .GetErrorName = &cudaGetErrorName,
      .GetErrorString = &cudaGetErrorString,
      .MemGetInfo = &testing::MemGetInfo,
      .MallocAsync = &testing::MallocAsync,
      .FreeAsync = &testing::FreeAsync,
      .HostAlloc = &testing::HostAlloc,
      .FreeHost = &testing::FreeHost,
      .StreamCreateWithFlags = &testing::StreamCreateWithFlags,
      .StreamDestroy = &testing::StreamDestroy,
      .StreamSynchronize = &testing::StreamSynchronize,
      .StreamIsCapturing = &testing::StreamIsCapturing,
      .EventCreateWithFlags = &testing::EventCreateWithFlags,
      .EventDestroy = &testing::EventDestroy,
      .EventRecord = &testing::EventRecord,
      .StreamWaitEvent = &testing::StreamWaitEvent,
      .EventQuery = &testing::EventQuery,
      .EventElapsedTime = &testing::EventElapsedTime,
      .MemcpyAsync = &testing::MemcpyAsync,
  };
  return api;
}

}  // namespace pinion::testing
