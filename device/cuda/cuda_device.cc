#include "pinion/device/cuda/cuda_device.h"

#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/sources/numa.h"
#include "pinion/allocator/sources/page_lock.h"
#include "pinion/device/cuda/cuda_calls.h"
#include "pinion/device/cuda/pci_link.h"
#include "pinion/device/cuda/poll_until.h"
#include "pinion/device/process_exit.h"

namespace pinion {
namespace {

absl::Status Check(StreamHandle stream) {
  if (!stream.valid()) {
    return absl::InvalidArgumentError(
        "a default-constructed StreamHandle names no stream: pass one that CreateStream returned");
  }
  if (stream.native() == cudaStreamPerThread) {
    return absl::InvalidArgumentError(
        "cudaStreamPerThread is another stream on each thread, and Pinion uses streams on other "
        "threads than their owner's; create a stream (cudaStreamCreateWithFlags) instead");
  }
  return absl::OkStatus();
}

absl::Status Check(EventHandle event) {
  if (event.valid()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "a default-constructed EventHandle names no event: pass one that CreateEvent returned");
}

absl::Status Check(absl::Span<const CopyPiece> pieces) {
  if (pieces.empty()) return absl::InvalidArgumentError("CopyAsync: no pieces: give one or more");
  for (const CopyPiece& piece : pieces) {
    if (piece.size_bytes == 0) {
      return absl::InvalidArgumentError("CopyAsync: a piece has size_bytes 0: leave it out");
    }
    if (piece.dst == nullptr || piece.src == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("CopyAsync: a piece of ", HumanBytes(piece.size_bytes),
                       " is at a null pointer: give the address of both ends"));
    }
  }
  return absl::OkStatus();
}

cudaStream_t Native(StreamHandle stream) { return static_cast<cudaStream_t>(stream.native()); }

cudaEvent_t Native(EventHandle event) { return static_cast<cudaEvent_t>(event.native()); }

}  // namespace

CudaDevice::CudaDevice(const CudaApi& api, int index)
    : api_(api), index_(index), pinned_source_(std::make_shared<CudaPinnedSource>(api, index)) {}

std::string CudaDevice::name() const { return absl::StrCat("cuda:", index_); }

template <typename Function>
absl::Status CudaDevice::Call(const char* name, const Function& function) const {
  CudaDeviceScope scope(api_, index_);
  PINION_RETURN_IF_ERROR(scope.status());
  const cudaError_t error = function();
  if (error == cudaSuccess) return absl::OkStatus();
  return CudaStatus(api_, error, absl::StrCat(name, " on ", this->name()));
}

template <typename Function>
absl::Status CudaDevice::CallRelaxed(const char* name, const Function& function) const {
  const RelaxedCaptureScope relaxed(api_);
  return Call(name, function);
}

DeviceInfo CudaDevice::info() const {
  DeviceInfo info;
  cudaDeviceProp properties = {};
  const cudaError_t error = api_.GetDeviceProperties(&properties, index_);
  if (CudaStatus(api_, error, "cudaGetDeviceProperties").ok()) info.model = properties.name;
  if (HasAttribute(api_, index_, cudaDevAttrIntegrated)) {
    info.link = LinkKind::kNone;
    info.link_name = "none: the device's memory is the host's";
    return info;
  }
  if (HasAttribute(api_, index_, cudaDevAttrPageableMemoryAccessUsesHostPageTables)) {
    info.link = LinkKind::kNvlinkC2c;
    info.link_name = "NVLink-C2C";
    // Per GPU and direction: one Hopper has 900 GB/s both ways together; two Blackwells share that.
    info.rated_gb_per_s = properties.major == 9 ? 450 : properties.major > 9 ? 225 : 0;
  }
  AddPciLink(PciLinkOf(api_, index_), &info);
  return info;
}

// --- Memory ---

absl::StatusOr<void*> CudaDevice::Allocate(uint64_t size_bytes, StreamHandle stream) {
  PINION_RETURN_IF_ERROR(Check(stream));
  if (size_bytes == 0)
    return absl::InvalidArgumentError("Allocate: size_bytes is 0: ask for one or more");
  void* data = nullptr;
  const absl::Status allocated = CallRelaxed(
      "cudaMallocAsync", [&] { return api_.MallocAsync(&data, size_bytes, Native(stream)); });
  if (absl::IsResourceExhausted(allocated)) {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    PINION_RETURN_IF_ERROR(
        CallRelaxed("cudaMemGetInfo", [&] { return api_.MemGetInfo(&free_bytes, &total_bytes); }));
    return absl::ResourceExhaustedError(absl::StrCat(
        name(), " cannot give ", HumanBytes(size_bytes), ": ", HumanBytes(free_bytes), " of ",
        HumanBytes(total_bytes),
        " are free (all processes, and what LibTorch caches, count): ", allocated.message()));
  }
  PINION_RETURN_IF_ERROR(allocated);
  return data;
}

absl::Status CudaDevice::Free(void* data, StreamHandle stream) {
  PINION_RETURN_IF_ERROR(Check(stream));
  if (data == nullptr)
    return absl::InvalidArgumentError("Free: data is null: pass an address that Allocate returned");
  return CallRelaxed("cudaFreeAsync", [&] { return api_.FreeAsync(data, Native(stream)); });
}

// --- Streams ---

absl::StatusOr<StreamHandle> CudaDevice::CreateStream(const std::string&) {
  cudaStream_t stream = nullptr;
  PINION_RETURN_IF_ERROR(CallRelaxed("cudaStreamCreateWithFlags", [&] {
    const PrimaryContextScope primary(api_, index_);
    return api_.StreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  }));
  return StreamHandle(stream);
}

absl::Status CudaDevice::DestroyStream(StreamHandle stream) {
  PINION_RETURN_IF_ERROR(Check(stream));
  return CallRelaxed("cudaStreamDestroy", [&] { return api_.StreamDestroy(Native(stream)); });
}

absl::Status CudaDevice::SynchronizeStream(StreamHandle stream) {
  PINION_RETURN_IF_ERROR(Check(stream));
  return CallRelaxed("cudaStreamSynchronize",
                     [&] { return api_.StreamSynchronize(Native(stream)); });
}

absl::StatusOr<bool> CudaDevice::IsCapturing(StreamHandle stream) {
  PINION_RETURN_IF_ERROR(Check(stream));
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  PINION_RETURN_IF_ERROR(CallRelaxed("cudaStreamIsCapturing", [&] {
    const cudaError_t error = api_.StreamIsCapturing(Native(stream), &status);
    if (error != cudaErrorStreamCaptureImplicit) return error;
    // The legacy stream while a blocking stream captures: using it would break that capture.
    api_.GetLastError();
    status = cudaStreamCaptureStatusActive;
    return cudaSuccess;
  }));
  return status != cudaStreamCaptureStatusNone;
}

// --- Events ---

absl::StatusOr<EventHandle> CudaDevice::CreateEvent() { return NewEvent(cudaEventDisableTiming); }

absl::StatusOr<EventHandle> CudaDevice::CreateTimedEvent() { return NewEvent(cudaEventDefault); }

absl::StatusOr<EventHandle> CudaDevice::NewEvent(unsigned int flags) {
  cudaEvent_t event = nullptr;
  PINION_RETURN_IF_ERROR(CallRelaxed("cudaEventCreateWithFlags", [&] {
    const PrimaryContextScope primary(api_, index_);
    return api_.EventCreateWithFlags(&event, flags);
  }));
  return EventHandle(event);
}

absl::StatusOr<double> CudaDevice::ElapsedMs(EventHandle start, EventHandle end) {
  PINION_RETURN_IF_ERROR(Check(start));
  PINION_RETURN_IF_ERROR(Check(end));
  float elapsed_ms = 0;
  bool done = true;
  PINION_RETURN_IF_ERROR(CallRelaxed("cudaEventElapsedTime", [&] {
    const cudaError_t error = api_.EventElapsedTime(&elapsed_ms, Native(start), Native(end));
    if (error != cudaErrorNotReady) return error;
    api_.GetLastError();  // as in QueryEvent
    done = false;
    return cudaSuccess;
  }));
  if (!done) return absl::UnavailableError("ElapsedMs: one of the events is not done");
  return elapsed_ms;
}

absl::Status CudaDevice::DestroyEvent(EventHandle event) {
  PINION_RETURN_IF_ERROR(Check(event));
  return CallRelaxed("cudaEventDestroy", [&] { return api_.EventDestroy(Native(event)); });
}

absl::Status CudaDevice::RecordEvent(EventHandle event, StreamHandle stream) {
  PINION_RETURN_IF_ERROR(Check(event));
  PINION_RETURN_IF_ERROR(Check(stream));
  return Call("cudaEventRecord", [&] { return api_.EventRecord(Native(event), Native(stream)); });
}

absl::Status CudaDevice::StreamWaitEvent(StreamHandle stream, EventHandle event) {
  PINION_RETURN_IF_ERROR(Check(stream));
  PINION_RETURN_IF_ERROR(Check(event));
  return Call("cudaStreamWaitEvent", [&] {
    return api_.StreamWaitEvent(Native(stream), Native(event), cudaEventWaitDefault);
  });
}

absl::StatusOr<bool> CudaDevice::QueryEvent(EventHandle event) {
  PINION_RETURN_IF_ERROR(Check(event));
  bool done = true;
  PINION_RETURN_IF_ERROR(CallRelaxed("cudaEventQuery", [&] {
    const cudaError_t error = api_.EventQuery(Native(event));
    if (error != cudaErrorNotReady) return error;
    api_.GetLastError();  // latched, and must not surface in another call
    done = false;
    return cudaSuccess;
  }));
  return done;
}

absl::Status CudaDevice::WaitEvent(EventHandle event, absl::Duration timeout) {
  PINION_ASSIGN_OR_RETURN(const bool done, PollUntil([&] { return QueryEvent(event); }, timeout));
  if (done) return absl::OkStatus();
  return absl::DeadlineExceededError(absl::StrCat(name(), ": an event was not done after ",
                                                  absl::FormatDuration(timeout),
                                                  "; CUDA does not say what its stream waits for"));
}

// --- Copies ---

absl::Status CudaDevice::CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                                   StreamHandle stream) {
  PINION_RETURN_IF_ERROR(Check(stream));
  PINION_RETURN_IF_ERROR(Check(pieces));
  const cudaMemcpyKind kind =
      direction == CopyDirection::kHostToDevice ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
  const absl::Status copied = Call("cudaMemcpyAsync", [&] {
    for (const CopyPiece& piece : pieces) {
      const cudaError_t error =
          api_.MemcpyAsync(piece.dst, piece.src, piece.size_bytes, kind, Native(stream));
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
  if (copied.ok() || pieces.size() == 1 || IsSticky(copied)) return copied;
  const absl::Status settled = SynchronizeStream(stream);
  if (settled.ok()) return copied;
  // As bad as a sticky error: a copy may still write memory that the caller believes is free.
  return absl::InternalError(absl::StrCat(
      copied.message(), "; its enqueued pieces could not be waited for: ", settled.message()));
}

// --- Pinned memory ---

CudaPinnedSource::CudaPinnedSource(const CudaApi& api, int index, const std::string& sysfs)
    : api_(api), index_(index), sysfs_(sysfs) {
  const absl::Status valid = api.Validate();
  PINION_CHECK(valid.ok()) << valid.message();
  WatchProcess();
}

absl::StatusOr<HostSegment> CudaPinnedSource::Allocate(uint64_t size_bytes) {
  PINION_RETURN_IF_ERROR(CheckSize(size_bytes));
  if (origin_.InForkedChild()) return origin_.Refusal(name());
  if (ProcessIsExiting()) {
    return absl::FailedPreconditionError(
        absl::StrCat(name(), ": the process is exiting; no more memory is pinned"));
  }
  // CUDA promises page alignment only, although large allocations usually start at 2 MiB
  // boundaries. After the first unaligned one, all requests are enlarged at once, because pinning
  // is too slow to repeat.
  if (comes_aligned_.load(std::memory_order_relaxed)) {
    PINION_ASSIGN_OR_RETURN(void* data, Pin(size_bytes));
    if (reinterpret_cast<uintptr_t>(data) % granularity_bytes() == 0) {
      return HandOut(data, size_bytes, {data, size_bytes});
    }
    comes_aligned_.store(false, std::memory_order_relaxed);
    if (absl::Status unpinned = Unpin(data, size_bytes); !unpinned.ok()) {
      MutexLock lock(mu_);
      left_over_[data] = size_bytes;
      return unpinned;
    }
  }
  UnpinLeftOver();
  const uint64_t larger_bytes = size_bytes + granularity_bytes();
  if (larger_bytes < size_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cudaHostAlloc of ", HumanBytes(size_bytes), ": no host has so much"));
  }
  PINION_ASSIGN_OR_RETURN(void* larger, Pin(larger_bytes));
  void* const aligned =
      reinterpret_cast<void*>(AlignUp(reinterpret_cast<uintptr_t>(larger), granularity_bytes()));
  return HandOut(aligned, size_bytes, {larger, larger_bytes});
}

HostSegment CudaPinnedSource::HandOut(void* data, uint64_t size_bytes, const Pinned& pinned) {
  absl::Cleanup unpin = [&] { Unpin(pinned.data, pinned.size_bytes).IgnoreError(); };
  const int node = NumaNodeOf(data, size_bytes, granularity_bytes());  // may throw
  {
    MutexLock lock(mu_);
    in_use_[data] = {size_bytes, pinned};  // may throw
  }
  std::move(unpin).Cancel();
  return {data, size_bytes, node};
}

bool CudaPinnedSource::LocksPages() const {
  return HasAttribute(api_, index_, cudaDevAttrPageableMemoryAccessUsesHostPageTables);
}

absl::StatusOr<void*> CudaPinnedSource::Pin(uint64_t size_bytes) {
  RelaxedCaptureScope relaxed(api_);
  CudaDeviceScope scope(api_, index_);
  PINION_RETURN_IF_ERROR(scope.status());
  const int node = PciLinkOf(api_, index_, sysfs_ + "/bus/pci/devices").numa_node;
  const ScopedNumaThread near(node, sysfs_ + "/devices/system/node/");
  // Before the call, because they may throw.
  const bool locks_pages = LocksPages();
  const std::string call = absl::StrCat("cudaHostAlloc of ", HumanBytes(size_bytes));
  void* data = nullptr;
  PINION_RETURN_IF_ERROR(
      CudaStatus(api_, api_.HostAlloc(&data, size_bytes, cudaHostAllocPortable), call));
  if (!locks_pages) return data;
  absl::Cleanup unpin = [&] { api_.FreeHost(data); };  // if the rest throws
  const absl::Status locked = LockPages(data, size_bytes, /*flags=*/0);
  if (!locked.ok() && is_pinned_.exchange(false)) {
    PINION_LOG(kWarning) << "cuda:" << index_ << " reads the host's page tables, so CUDA does not "
                         << "lock host memory, and the system refuses to: pages may be swapped or "
                         << "moved (" << locked.message() << ")";
  }
  std::move(unpin).Cancel();
  return data;
}

absl::Status CudaPinnedSource::Unpin(void* data, uint64_t size_bytes) {
  RelaxedCaptureScope relaxed(api_);
  CudaDeviceScope scope(api_, index_);
  PINION_RETURN_IF_ERROR(scope.status());
  if (LocksPages()) UnlockPages(data, size_bytes);
  const cudaError_t error = api_.FreeHost(data);
  if (error == cudaSuccess) return absl::OkStatus();
  return CudaStatus(api_, error, absl::StrCat("cudaFreeHost of ", HumanBytes(size_bytes)));
}

void CudaPinnedSource::UnpinLeftOver() {
  std::map<void*, uint64_t> left_over;
  {
    MutexLock lock(mu_);
    left_over.swap(left_over_);
  }
  std::erase_if(left_over, [this](const auto& one) { return Unpin(one.first, one.second).ok(); });
  MutexLock lock(mu_);
  left_over_.merge(left_over);
}

absl::Status CudaPinnedSource::Free(const HostSegment& segment) {
  if (ProcessIsExiting() || origin_.InForkedChild()) return absl::OkStatus();
  UnpinLeftOver();
  std::map<void*, InUse>::node_type freed;
  {
    MutexLock lock(mu_);
    const auto found = in_use_.find(segment.data);
    if (found == in_use_.end() || found->second.size_bytes != segment.size_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          "CudaPinnedSource::Free: this source has no segment of ", HumanBytes(segment.size_bytes),
          " in use at 0x", absl::Hex(reinterpret_cast<uintptr_t>(segment.data)),
          "; pass each segment that its Allocate returned, unchanged and once"));
    }
    // Before the call, behind which another thread may get a segment at this address.
    freed = in_use_.extract(found);
  }
  absl::Cleanup put_back = [&] {
    // The memory is still pinned, and a repeated Free names the same address.
    MutexLock lock(mu_);
    in_use_.insert(std::move(freed));
  };
  const Pinned pinned = freed.mapped().pinned;
  absl::Status unpinned = Unpin(pinned.data, pinned.size_bytes);  // may throw
  if (unpinned.ok()) std::move(put_back).Cancel();
  return unpinned;
}

}  // namespace pinion
