#include "pinion/tests/device/cuda/fake_cuda.h"

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"

namespace pinion::testing {
namespace {

constexpr uint64_t kPage = 4 * kKiB;

std::atomic<FakeCuda*> the_fake{nullptr};

struct ThreadState {
  int device = 0;
  cudaError_t last_error = cudaSuccess;
  cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
};
thread_local ThreadState thread_state;

bool IsSticky(cudaError_t error) { return error == cudaErrorIllegalAddress; }

// Returns from the calling function what the call is to fail with.
#define FAKE_CUDA_ENTER(fake, function) \
  if (const cudaError_t error = (fake).Enter(function); error != cudaSuccess) return error

cudaError_t GetDeviceCount(int* count) {
  FAKE_CUDA_ENTER(FakeCuda::Get(), "GetDeviceCount");
  if (FakeCuda::Get().no_driver()) return FakeCuda::Latch(cudaErrorInsufficientDriver);
  *count = FakeCuda::Get().machine().device_count();
  return cudaSuccess;
}

cudaError_t GetDevice(int* device) {
  FAKE_CUDA_ENTER(FakeCuda::Get(), "GetDevice");
  *device = thread_state.device;
  return cudaSuccess;
}

cudaError_t SetDevice(int device) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_ENTER(fake, "SetDevice");
  if (device < 0 || device >= fake.machine().device_count()) {
    return FakeCuda::Latch(cudaErrorInvalidDevice);
  }
  thread_state.device = device;
  return cudaSuccess;
}

// The fake's devices hang on no bus.
cudaError_t DeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_ENTER(fake, "DeviceGetAttribute");
  if (device >= fake.machine().device_count()) return FakeCuda::Latch(cudaErrorInvalidDevice);
  const DeviceInfo info = fake.machine().device(device)->info();
  *value = 0;
  if (attribute == cudaDevAttrPageableMemoryAccessUsesHostPageTables) {
    *value = info.link == LinkKind::kNvlinkC2c;
  }
  return cudaSuccess;
}

cudaError_t DeviceGetPCIBusId(char*, int, int) {
  FAKE_CUDA_ENTER(FakeCuda::Get(), "DeviceGetPCIBusId");
  return FakeCuda::Latch(cudaErrorInvalidDevice);
}

cudaError_t GetDeviceProperties(cudaDeviceProp* properties, int device) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_ENTER(fake, "GetDeviceProperties");
  if (device >= fake.machine().device_count()) return FakeCuda::Latch(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "%s",
                fake.machine().device(device)->info().model.c_str());
  properties->major = 9;
  return cudaSuccess;
}

cudaError_t ThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_state.capture_mode);
  return cudaSuccess;
}

cudaError_t GetLastError() {
  const cudaError_t error = thread_state.last_error;
  if (!IsSticky(error)) thread_state.last_error = cudaSuccess;
  return error;
}

cudaError_t MemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_ENTER(fake, "MemGetInfo");
  const MemoryStats stats = fake.machine().memory_stats(thread_state.device);
  *free_bytes = stats.limit_bytes - stats.in_use_bytes;
  *total_bytes = stats.limit_bytes;
  return cudaSuccess;
}

cudaError_t MallocAsync(void** data, size_t size_bytes, cudaStream_t stream) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_ENTER(fake, "MallocAsync");
  const absl::StatusOr<void*> allocated = fake.current().Allocate(size_bytes, fake.Stream(stream));
  if (allocated.ok()) *data = *allocated;
  return FakeCuda::Latch(allocated.status());
}

cudaError_t FreeAsync(void* data, cudaStream_t stream) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_ENTER(fake, "FreeAsync");
  return FakeCuda::Latch(fake.current().Free(data, fake.Stream(stream)));
}

cudaError_t HostAlloc(void** data, size_t size_bytes, unsigned int flags) {
  FakeCuda& fake = FakeCuda::Get();
  PINION_CHECK(flags == cudaHostAllocPortable) << "not usable by every device: " << flags;
  if (const cudaError_t error = fake.EnterUnsafe("HostAlloc"); error != cudaSuccess) return error;
  return FakeCuda::Latch(fake.HostAlloc(data, size_bytes));
}

cudaError_t FreeHost(void* data) {
  FakeCuda& fake = FakeCuda::Get();
  if (const cudaError_t error = fake.EnterUnsafe("FreeHost"); error != cudaSuccess) return error;
  return FakeCuda::Latch(fake.FreeHost(data));
}

cudaError_t StreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_ENTER(fake, "StreamCreateWithFlags");
  PINION_CHECK(flags == cudaStreamNonBlocking) << "a stream that waits for the legacy one";
  const absl::StatusOr<StreamHandle> created = fake.current().CreateStream("fake cuda");
  if (created.ok()) *stream = static_cast<cudaStream_t>(created->native());
  return FakeCuda::Latch(created.status());
}

cudaError_t StreamDestroy(cudaStream_t stream) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_ENTER(fake, "StreamDestroy");
  return FakeCuda::Latch(fake.current().DestroyStream(fake.Stream(stream)));
}

cudaError_t StreamSynchronize(cudaStream_t stream) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_ENTER(fake, "StreamSynchronize");
  return FakeCuda::Latch(fake.current().SynchronizeStream(fake.Stream(stream)));
}

cudaError_t StreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_ENTER(fake, "StreamIsCapturing");
  const absl::StatusOr<bool> capturing = fake.current().IsCapturing(fake.Stream(stream));
  if (capturing.ok()) {
    *status = *capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  }
  return FakeCuda::Latch(capturing.status());
}

cudaError_t EventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_ENTER(fake, "EventCreateWithFlags");
  PINION_CHECK(flags == cudaEventDisableTiming || flags == cudaEventDefault) << flags;
  const absl::StatusOr<EventHandle> created =
      flags == cudaEventDefault ? fake.current().CreateTimedEvent() : fake.current().CreateEvent();
  if (created.ok()) *event = static_cast<cudaEvent_t>(created->native());
  return FakeCuda::Latch(created.status());
}

cudaError_t EventDestroy(cudaEvent_t event) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_ENTER(fake, "EventDestroy");
  return FakeCuda::Latch(fake.current().DestroyEvent(EventHandle(event)));
}

cudaError_t EventRecord(cudaEvent_t event, cudaStream_t stream) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_ENTER(fake, "EventRecord");
  return FakeCuda::Latch(fake.current().RecordEvent(EventHandle(event), fake.Stream(stream)));
}

cudaError_t StreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_ENTER(fake, "StreamWaitEvent");
  PINION_CHECK(flags == cudaEventWaitDefault);
  return FakeCuda::Latch(fake.current().StreamWaitEvent(fake.Stream(stream), EventHandle(event)));
}

cudaError_t EventQuery(cudaEvent_t event) {
  FakeCuda& fake = FakeCuda::Get();
  if (const cudaError_t error = fake.EnterUnsafe("EventQuery"); error != cudaSuccess) return error;
  const absl::StatusOr<bool> done = fake.current().QueryEvent(EventHandle(event));
  if (done.ok() && !*done) return FakeCuda::Latch(cudaErrorNotReady);
  return FakeCuda::Latch(done.status());
}

cudaError_t EventElapsedTime(float* elapsed_ms, cudaEvent_t start, cudaEvent_t end) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_ENTER(fake, "EventElapsedTime");
  const absl::StatusOr<double> elapsed =
      fake.current().ElapsedMs(EventHandle(start), EventHandle(end));
  if (absl::IsUnavailable(elapsed.status())) return FakeCuda::Latch(cudaErrorNotReady);
  if (elapsed.ok()) *elapsed_ms = static_cast<float>(*elapsed);
  return FakeCuda::Latch(elapsed.status());
}

cudaError_t MemcpyAsync(void* dst, const void* src, size_t size_bytes, cudaMemcpyKind kind,
                        cudaStream_t stream) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_ENTER(fake, "MemcpyAsync");
  PINION_CHECK(kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToHost);
  const CopyPiece piece = {dst, src, size_bytes};
  return FakeCuda::Latch(fake.current().CopyAsync(
      kind == cudaMemcpyHostToDevice ? CopyDirection::kHostToDevice : CopyDirection::kDeviceToHost,
      {&piece, 1}, fake.Stream(stream)));
}

cudaError_t MemcpyBatchAsync(void* const* dsts, const void* const* srcs, const size_t* sizes,
                             size_t count, cudaStream_t stream) {
  FakeCuda& fake = FakeCuda::Get();
  FAKE_CUDA_ENTER(fake, "MemcpyBatchAsync");
  if (stream == nullptr || count == 0) return FakeCuda::Latch(cudaErrorInvalidValue);
  std::vector<CopyPiece> pieces;
  for (size_t i = 0; i < count; ++i) pieces.push_back({dsts[i], srcs[i], sizes[i]});
  int device = 0;
  const bool h2d = fake.machine().IsDevicePointer(dsts[0], &device);
  return FakeCuda::Latch(
      fake.current().CopyAsync(h2d ? CopyDirection::kHostToDevice : CopyDirection::kDeviceToHost,
                               pieces, fake.Stream(stream)));
}

#undef FAKE_CUDA_ENTER

}  // namespace

FakeCuda::FakeCuda(const EmulatedOptions& options)
    : machine_(EmulatedMachine::Create(options).value()) {
  PINION_CHECK(the_fake.exchange(this) == nullptr) << "two FakeCuda at a time";
  thread_state = ThreadState();
}

FakeCuda::~FakeCuda() { the_fake = nullptr; }

const CudaApi& FakeCuda::Api() {
  static constexpr CudaApi api = {
      .GetDeviceCount = &testing::GetDeviceCount,
      .GetDevice = &testing::GetDevice,
      .SetDevice = &testing::SetDevice,
      .DeviceGetAttribute = &testing::DeviceGetAttribute,
      .DeviceGetPCIBusId = &testing::DeviceGetPCIBusId,
      .GetDeviceProperties = &testing::GetDeviceProperties,
      .ThreadExchangeStreamCaptureMode = &testing::ThreadExchangeStreamCaptureMode,
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
      .MemcpyBatchAsync = &testing::MemcpyBatchAsync,
  };
  return api;
}

const CudaApi& FakeCuda::ApiWithoutBatch() {
  static const CudaApi api = [] {
    CudaApi older = Api();
    older.MemcpyBatchAsync = nullptr;
    return older;
  }();
  return api;
}

void FakeCuda::FailNext(const std::string& function, cudaError_t error) {
  MutexLock lock(mu_);
  fail_next_[function] = error;
}

void FakeCuda::SetCapturing(StreamHandle stream, bool capturing) {
  PINION_CHECK(machine_->SetCapturing(stream, capturing).ok());
  MutexLock lock(mu_);
  capturing_ += capturing ? 1 : -1;
}

bool FakeCuda::capture_spoiled() const {
  MutexLock lock(mu_);
  return capture_spoiled_;
}

int FakeCuda::calls(const std::string& function) const {
  MutexLock lock(mu_);
  const auto it = calls_.find(function);
  return it == calls_.end() ? 0 : it->second;
}

FakeCuda& FakeCuda::Get() {
  FakeCuda* const fake = the_fake;
  PINION_CHECK(fake != nullptr) << "the runtime was called after it was unloaded";
  return *fake;
}

Device& FakeCuda::current() { return *machine_->device(thread_state.device); }

StreamHandle FakeCuda::Stream(cudaStream_t stream) {
  return stream == nullptr ? machine_->default_stream(thread_state.device) : StreamHandle(stream);
}

cudaError_t FakeCuda::Enter(const char* function) {
  if (IsSticky(thread_state.last_error)) return thread_state.last_error;
  MutexLock lock(mu_);
  ++calls_[function];
  const auto failing = fail_next_.extract(function);
  return failing.empty() ? cudaSuccess : Latch(failing.mapped());
}

cudaError_t FakeCuda::EnterUnsafe(const char* function) {
  {
    MutexLock lock(mu_);
    if (capturing_ > 0 && thread_state.capture_mode != cudaStreamCaptureModeRelaxed) {
      capture_spoiled_ = true;
      return Latch(cudaErrorStreamCaptureUnsupported);
    }
  }
  return Enter(function);
}

cudaError_t FakeCuda::Latch(cudaError_t error) {
  if (error != cudaSuccess) thread_state.last_error = error;
  return error;
}

cudaError_t FakeCuda::Latch(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return cudaSuccess;
    case absl::StatusCode::kResourceExhausted:
      return Latch(cudaErrorMemoryAllocation);
    case absl::StatusCode::kUnavailable:
      return Latch(cudaErrorDevicesUnavailable);
    case absl::StatusCode::kFailedPrecondition:
      return Latch(cudaErrorCapturedEvent);
    case absl::StatusCode::kInternal:
      return Latch(cudaErrorIllegalAddress);
    default:
      return Latch(cudaErrorInvalidValue);
  }
}

absl::Status FakeCuda::HostAlloc(void** data, size_t size_bytes) {
  const std::shared_ptr<HostMemorySource> source = current().pinned_source();
  const uint64_t slack_bytes = pages_only_ ? kPage : 0;
  const absl::StatusOr<HostSegment> segment =
      source->Allocate(AlignUp(size_bytes + slack_bytes, source->granularity_bytes()));
  if (!segment.ok()) return segment.status();
  char* begin = static_cast<char*>(segment->data);
  if (pages_only_) begin += reinterpret_cast<uintptr_t>(begin) % (2 * kPage) == 0 ? kPage : 0;
  *data = begin;
  MutexLock lock(mu_);
  pinned_[*data] = *segment;
  return absl::OkStatus();
}

absl::Status FakeCuda::FreeHost(void* data) {
  HostSegment segment;
  {
    MutexLock lock(mu_);
    const auto node = pinned_.extract(data);
    if (node.empty()) return absl::InvalidArgumentError("cudaHostAlloc did not return this");
    segment = node.mapped();
  }
  return current().pinned_source()->Free(segment);
}

}  // namespace pinion::testing
