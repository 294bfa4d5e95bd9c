#include "pinion/device/cuda/cuda_device.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/cuda/cuda_pinned_source.h"
#include "pinion/device/cuda/cuda_scope.h"
#include "pinion/device/cuda/cuda_status.h"

namespace pinion {
namespace {

cudaStream_t Native(StreamHandle stream) {
  PINION_CHECK(stream.valid()) << "a default-constructed StreamHandle names no stream";
  return static_cast<cudaStream_t>(stream.native());
}

cudaEvent_t Native(EventHandle event) {
  PINION_CHECK(event.valid()) << "a default-constructed EventHandle names no event";
  return static_cast<cudaEvent_t>(event.native());
}

}  // namespace

CudaDevice::CudaDevice(const CudaApi& api, int index)
    : api_(api), index_(index), pinned_source_(std::make_shared<CudaPinnedSource>(api, index)) {}

std::string CudaDevice::name() const { return absl::StrCat("cuda:", index_); }

absl::Status CudaDevice::ToStatus(cudaError_t error, const char* call) const {
  if (error == cudaSuccess) return absl::OkStatus();
  return CudaStatus(api_, error, absl::StrCat(call, " on ", name()));
}

absl::StatusOr<void*> CudaDevice::Allocate(uint64_t size_bytes, StreamHandle stream) {
  PINION_CHECK(size_bytes > 0);
  CudaDeviceScope scope(api_, index_);
  PINION_RETURN_IF_ERROR(scope.status());
  void* data = nullptr;
  const absl::Status allocated =
      ToStatus(api_.MallocAsync(&data, size_bytes, Native(stream)), "cudaMallocAsync");
  if (absl::IsResourceExhausted(allocated)) {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    if (api_.MemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) api_.GetLastError();
    return absl::ResourceExhaustedError(absl::StrCat(
        name(), " cannot give ", HumanBytes(size_bytes), ": ", HumanBytes(free_bytes), " of ",
        HumanBytes(total_bytes),
        " are free (all processes, and what LibTorch caches, count): ", allocated.message()));
  }
  PINION_RETURN_IF_ERROR(allocated);
  return data;
}

absl::Status CudaDevice::Free(void* data, StreamHandle stream) {
  CudaDeviceScope scope(api_, index_);
  PINION_RETURN_IF_ERROR(scope.status());
  return ToStatus(api_.FreeAsync(data, Native(stream)), "cudaFreeAsync");
}

absl::StatusOr<StreamHandle> CudaDevice::CreateStream(const std::string&) {
  CudaDeviceScope scope(api_, index_);
  PINION_RETURN_IF_ERROR(scope.status());
  cudaStream_t stream = nullptr;
  PINION_RETURN_IF_ERROR(ToStatus(api_.StreamCreateWithFlags(&stream, cudaStreamNonBlocking),
                                  "cudaStreamCreateWithFlags"));
  return StreamHandle(stream);
}

absl::Status CudaDevice::DestroyStream(StreamHandle stream) {
  CudaDeviceScope scope(api_, index_);
  PINION_RETURN_IF_ERROR(scope.status());
  return ToStatus(api_.StreamDestroy(Native(stream)), "cudaStreamDestroy");
}

absl::Status CudaDevice::SynchronizeStream(StreamHandle stream) {
  CudaDeviceScope scope(api_, index_);
  PINION_RETURN_IF_ERROR(scope.status());
  return ToStatus(api_.StreamSynchronize(Native(stream)), "cudaStreamSynchronize");
}

absl::StatusOr<bool> CudaDevice::IsCapturing(StreamHandle stream) {
  CudaDeviceScope scope(api_, index_);
  PINION_RETURN_IF_ERROR(scope.status());
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = api_.StreamIsCapturing(Native(stream), &status);
  if (error == cudaErrorStreamCaptureImplicit) {
    // The legacy stream, while a blocking stream captures: touching it would spoil that capture.
    api_.GetLastError();
    return true;
  }
  PINION_RETURN_IF_ERROR(ToStatus(error, "cudaStreamIsCapturing"));
  return status != cudaStreamCaptureStatusNone;
}

absl::StatusOr<EventHandle> CudaDevice::CreateEvent() {
  CudaDeviceScope scope(api_, index_);
  PINION_RETURN_IF_ERROR(scope.status());
  cudaEvent_t event = nullptr;
  PINION_RETURN_IF_ERROR(ToStatus(api_.EventCreateWithFlags(&event, cudaEventDisableTiming),
                                  "cudaEventCreateWithFlags"));
  return EventHandle(event);
}

absl::Status CudaDevice::DestroyEvent(EventHandle event) {
  CudaDeviceScope scope(api_, index_);
  PINION_RETURN_IF_ERROR(scope.status());
  return ToStatus(api_.EventDestroy(Native(event)), "cudaEventDestroy");
}

absl::Status CudaDevice::RecordEvent(EventHandle event, StreamHandle stream) {
  CudaDeviceScope scope(api_, index_);
  PINION_RETURN_IF_ERROR(scope.status());
  return ToStatus(api_.EventRecord(Native(event), Native(stream)), "cudaEventRecord");
}

absl::Status CudaDevice::StreamWaitEvent(StreamHandle stream, EventHandle event) {
  CudaDeviceScope scope(api_, index_);
  PINION_RETURN_IF_ERROR(scope.status());
  return ToStatus(api_.StreamWaitEvent(Native(stream), Native(event), cudaEventWaitDefault),
                  "cudaStreamWaitEvent");
}

absl::StatusOr<bool> CudaDevice::QueryEvent(EventHandle event) {
  CudaDeviceScope scope(api_, index_);
  PINION_RETURN_IF_ERROR(scope.status());
  RelaxedCaptureScope relaxed(api_);
  const cudaError_t error = api_.EventQuery(Native(event));
  if (error == cudaErrorNotReady) {
    api_.GetLastError();  // it is latched like any error, and must not be found by anybody else
    return false;
  }
  PINION_RETURN_IF_ERROR(ToStatus(error, "cudaEventQuery"));
  return true;
}

// CUDA waits for an event with no timeout, so this asks in growing intervals: short ones while a
// copy of usual size takes, long ones while something is stuck.
absl::Status CudaDevice::WaitEvent(EventHandle event, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  absl::Duration pause = absl::Microseconds(10);
  while (true) {
    PINION_ASSIGN_OR_RETURN(const bool done, QueryEvent(event));
    if (done) return absl::OkStatus();
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(
          absl::StrCat(name(), ": an event was not done after ", absl::FormatDuration(timeout),
                       "; CUDA does not say what its stream waits for"));
    }
    absl::SleepFor(std::min(pause, left));
    pause = std::min(pause * 1.25, absl::Milliseconds(1));
  }
}

absl::Status CudaDevice::CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                                   StreamHandle stream) {
  PINION_CHECK(!pieces.empty());
  CudaDeviceScope scope(api_, index_);
  PINION_RETURN_IF_ERROR(scope.status());
  absl::Status copied = CopyPieces(direction, pieces, Native(stream));
  if (!copied.ok() && pieces.size() > 1 &&
      ClassifyDeviceError(copied) != DeviceErrorClass::kSticky) {
    PINION_RETURN_IF_ERROR(
        ToStatus(api_.StreamSynchronize(Native(stream)), "cudaStreamSynchronize"));
  }
  return copied;
}

absl::Status CudaDevice::CopyPieces(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                                    cudaStream_t stream) {
  // The batch call does not take the legacy default stream.
  if (pieces.size() > 1 && api_.MemcpyBatchAsync != nullptr && stream != nullptr &&
      stream != cudaStreamLegacy) {
    std::vector<void*> dsts;
    std::vector<const void*> srcs;
    std::vector<size_t> sizes;
    dsts.reserve(pieces.size());
    srcs.reserve(pieces.size());
    sizes.reserve(pieces.size());
    for (const CopyPiece& piece : pieces) {
      dsts.push_back(piece.dst);
      srcs.push_back(piece.src);
      sizes.push_back(piece.size_bytes);
    }
    return ToStatus(
        api_.MemcpyBatchAsync(dsts.data(), srcs.data(), sizes.data(), pieces.size(), stream),
        "cudaMemcpyBatchAsync");
  }
  const cudaMemcpyKind kind =
      direction == CopyDirection::kHostToDevice ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
  for (const CopyPiece& piece : pieces) {
    PINION_RETURN_IF_ERROR(ToStatus(
        api_.MemcpyAsync(piece.dst, piece.src, piece.size_bytes, kind, stream), "cudaMemcpyAsync"));
  }
  return absl::OkStatus();
}

}  // namespace pinion
