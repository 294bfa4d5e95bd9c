#include "pinion/device/cuda/cuda_pinned_source.h"

#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/sources/numa.h"
#include "pinion/allocator/sources/page_lock.h"
#include "pinion/device/cuda/cuda_scope.h"
#include "pinion/device/cuda/cuda_status.h"
#include "pinion/device/cuda/pci_link.h"
#include "pinion/device/process_exit.h"

namespace pinion {

CudaPinnedSource::CudaPinnedSource(const CudaApi& api, int index, const std::string& sysfs)
    : api_(api), index_(index), sysfs_(sysfs) {
  WatchProcess();
}

absl::StatusOr<HostSegment> CudaPinnedSource::Allocate(uint64_t size_bytes) {
  PINION_CHECK(size_bytes > 0 && size_bytes % granularity_bytes() == 0)
      << size_bytes << " bytes are not a multiple of " << granularity_bytes();
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
      return HostSegment{data, size_bytes, NumaNodeOf(data, size_bytes, granularity_bytes())};
    }
    comes_aligned_.store(false, std::memory_order_relaxed);
    if (absl::Status unpinned = Unpin(data, size_bytes); !unpinned.ok()) {
      MutexLock lock(mu_);
      left_over_[data] = size_bytes;
      return unpinned;
    }
  }
  UnpinLeftOver();
  PINION_ASSIGN_OR_RETURN(void* larger, Pin(size_bytes + granularity_bytes()));
  void* const aligned =
      reinterpret_cast<void*>(AlignUp(reinterpret_cast<uintptr_t>(larger), granularity_bytes()));
  {
    MutexLock lock(mu_);
    unaligned_[aligned] = larger;
  }
  return HostSegment{aligned, size_bytes, NumaNodeOf(aligned, size_bytes, granularity_bytes())};
}

bool CudaPinnedSource::LocksPages() const {
  return HasAttribute(api_, index_, cudaDevAttrPageableMemoryAccessUsesHostPageTables);
}

absl::StatusOr<void*> CudaPinnedSource::Pin(uint64_t size_bytes) {
  CudaDeviceScope scope(api_, index_);
  PINION_RETURN_IF_ERROR(scope.status());
  RelaxedCaptureScope relaxed(api_);
  const int node = PciLinkOf(api_, index_, sysfs_ + "/bus/pci/devices").numa_node;
  const ScopedNumaThread near(node, sysfs_ + "/devices/system/node/");
  void* data = nullptr;
  PINION_RETURN_IF_ERROR(CudaStatus(api_, api_.HostAlloc(&data, size_bytes, cudaHostAllocPortable),
                                    absl::StrCat("cudaHostAlloc of ", HumanBytes(size_bytes))));
  if (!LocksPages()) return data;
  const absl::Status locked = LockPages(data, size_bytes, /*flags=*/0);
  if (!locked.ok() && is_pinned_.exchange(false)) {
    PINION_LOG(kWarning) << "cuda:" << index_ << " reads the host's page tables, so CUDA does not "
                         << "lock host memory, and the system refuses to: pages may be swapped or "
                         << "moved (" << locked.message() << ")";
  }
  return data;
}

absl::Status CudaPinnedSource::Unpin(void* data, uint64_t size_bytes) {
  CudaDeviceScope scope(api_, index_);
  PINION_RETURN_IF_ERROR(scope.status());
  RelaxedCaptureScope relaxed(api_);
  if (LocksPages()) UnlockPages(data, size_bytes);
  return CudaStatus(api_, api_.FreeHost(data),
                    absl::StrCat("cudaFreeHost of ", HumanBytes(size_bytes)));
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
  std::map<void*, void*>::node_type unaligned;
  {
    MutexLock lock(mu_);
    unaligned = unaligned_.extract(segment.data);
  }
  if (unaligned.empty()) return Unpin(segment.data, segment.size_bytes);
  absl::Status unpinned = Unpin(unaligned.mapped(), segment.size_bytes + granularity_bytes());
  if (!unpinned.ok()) {
    // The memory is still pinned, and a repeated Free names the same address.
    MutexLock lock(mu_);
    unaligned_.insert(std::move(unaligned));
  }
  return unpinned;
}

}  // namespace pinion
