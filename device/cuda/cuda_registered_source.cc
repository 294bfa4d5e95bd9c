#include "pinion/device/cuda/cuda_registered_source.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/device/cuda/cuda_scope.h"
#include "pinion/device/cuda/cuda_status.h"
#include "pinion/device/process_exit.h"

namespace pinion {
namespace {

// Returns the size of the registration that begins at `at_bytes`. A segment of at most
// kRegistrationBytes is one registration at any address, so copies of it need no splitting.
uint64_t RegistrationBytesAt(const HostSegment& segment, uint64_t at_bytes) {
  if (segment.size_bytes <= kRegistrationBytes) return segment.size_bytes;
  return BytesToRegistrationBorder(static_cast<const char*>(segment.data) + at_bytes,
                                   segment.size_bytes - at_bytes);
}

}  // namespace

uint64_t BytesToRegistrationBorder(const void* data, uint64_t size_bytes) {
  const uint64_t past_border = reinterpret_cast<uintptr_t>(data) % kRegistrationBytes;
  return std::min(size_bytes, kRegistrationBytes - past_border);
}

CudaRegisteredSource::CudaRegisteredSource(const CudaApi& api, int index,
                                           std::shared_ptr<MmapSource> memory)
    : api_(api), index_(index), memory_(std::move(memory)) {
  WatchProcess();
}

absl::StatusOr<std::shared_ptr<CudaRegisteredSource>> CudaRegisteredSource::Create(
    const CudaApi& api, int index, const MmapOptions& memory) {
  PINION_ASSIGN_OR_RETURN(std::shared_ptr<MmapSource> mapped, MmapSource::Create(memory));
  const auto attribute = [&](cudaDeviceAttr which) -> absl::StatusOr<int> {
    int value = 0;
    PINION_RETURN_IF_ERROR(CudaStatus(api, api.DeviceGetAttribute(&value, which, index),
                                      absl::StrCat("cudaDeviceGetAttribute on cuda:", index)));
    return value;
  };
  PINION_ASSIGN_OR_RETURN(const int host_page_tables,
                          attribute(cudaDevAttrPageableMemoryAccessUsesHostPageTables));
  if (host_page_tables != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("cuda:", index,
                     " reads the host's page tables, as GH200 does: cudaHostRegister does not lock "
                     "pages there; use CudaPinnedSource, which locks them itself"));
  }
  PINION_ASSIGN_OR_RETURN(const int same_address,
                          attribute(cudaDevAttrCanUseHostPointerForRegisteredMem));
  if (same_address == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("cuda:", index,
                     " sees registered memory at another address than the host does, as under "
                     "WSL2; use CudaPinnedSource (cudaHostAlloc)"));
  }
  return std::shared_ptr<CudaRegisteredSource>(
      new CudaRegisteredSource(api, index, std::move(mapped)));
}

bool CudaRegisteredSource::JoinsAt(const void* border) const {
  return reinterpret_cast<uintptr_t>(border) % kRegistrationBytes == 0;
}

absl::StatusOr<HostSegment> CudaRegisteredSource::Allocate(uint64_t size_bytes) {
  PINION_ASSIGN_OR_RETURN(const HostSegment segment, memory_->Allocate(size_bytes));
  // Checked after the mapping, because touching pages takes a while.
  if (ProcessIsExiting()) {
    memory_->Free(segment).IgnoreError();
    return absl::FailedPreconditionError(
        absl::StrCat(name(), ": the process is exiting; no more memory is pinned"));
  }
  PINION_RETURN_IF_ERROR(Register(segment));
  return segment;
}

absl::Status CudaRegisteredSource::Register(const HostSegment& segment) {
  CudaDeviceScope scope(api_, index_);
  absl::Status registered = scope.status();
  RelaxedCaptureScope relaxed(api_);
  uint64_t done_bytes = 0;
  while (registered.ok() && done_bytes < segment.size_bytes) {
    const uint64_t size_bytes = RegistrationBytesAt(segment, done_bytes);
    registered = CudaStatus(
        api_,
        api_.HostRegister(static_cast<char*>(segment.data) + done_bytes, size_bytes,
                          cudaHostRegisterPortable),
        absl::StrCat("cudaHostRegister of ", HumanBytes(size_bytes), " (", HumanBytes(done_bytes),
                     " of a segment of ", HumanBytes(segment.size_bytes), " are registered)"));
    if (registered.ok()) done_bytes += size_bytes;
  }
  if (registered.ok()) return registered;
  // CUDA still holds these addresses as registered, so mmap must never reuse them. The caller gets
  // the error that explains the missing memory.
  if (Unregister(segment, done_bytes).ok()) memory_->Free(segment).IgnoreError();
  return registered;
}

absl::Status CudaRegisteredSource::Unregister(const HostSegment& segment, uint64_t size_bytes) {
  CudaDeviceScope scope(api_, index_);
  PINION_RETURN_IF_ERROR(scope.status());
  RelaxedCaptureScope relaxed(api_);
  absl::Status first_error;
  for (uint64_t at = 0; at < size_bytes; at += RegistrationBytesAt(segment, at)) {
    first_error.Update(CudaStatus(
        api_, api_.HostUnregister(static_cast<char*>(segment.data) + at),
        absl::StrCat("cudaHostUnregister in a segment of ", HumanBytes(segment.size_bytes))));
  }
  return first_error;
}

absl::Status CudaRegisteredSource::Free(const HostSegment& segment) {
  if (ProcessIsExiting() || origin_.InForkedChild()) return absl::OkStatus();
  // After an error the addresses stay mapped: see Register.
  PINION_RETURN_IF_ERROR(Unregister(segment, segment.size_bytes));
  return memory_->Free(segment);
}

}  // namespace pinion
