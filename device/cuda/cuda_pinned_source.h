// Allocates page-locked host memory by cudaHostAlloc, usable by every CUDA device of the process.
//
//   auto source = std::make_shared<CudaPinnedSource>(RealCudaApi(), /*index=*/0);
//   PINION_ASSIGN_OR_RETURN(auto allocator, PinnedAllocator::Create({}, std::move(source)));
//
// Memory comes from the NUMA node next to the device if the system lets the thread move there.
// CUDA does not promise to lock pages if the device reads the host's page tables (GH200). There the
// source locks the pages itself (mlock2). If the system refuses, pinned() becomes false: copies
// stay correct, but the system may swap or move the pages.
//
// Memory that CUDA refuses to free stays pinned. A repeated Free may free it.
//
// While the process exits, and in a child of fork(), Free leaves the memory to the operating
// system, and Allocate returns FailedPrecondition.
//
// Thread safety: thread-safe. Pinning can stall other driver users; freeing waits for the device.

#ifndef PINION_DEVICE_CUDA_CUDA_PINNED_SOURCE_H_
#define PINION_DEVICE_CUDA_CUDA_PINNED_SOURCE_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/fork_origin.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/cuda/cuda_api.h"

namespace pinion {

class CudaPinnedSource final : public HostMemorySource {
 public:
  // Pins through device `index`; `api` outlives the source. Tests inject another `sysfs`.
  CudaPinnedSource(const CudaApi& api, int index, const std::string& sysfs = "/sys");

  std::string name() const override { return "cudaHostAlloc"; }
  bool pinned() const override { return is_pinned_.load(std::memory_order_relaxed); }
  uint64_t granularity_bytes() const override { return uint64_t{2} << 20; }
  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override;
  absl::Status Free(const HostSegment& segment) override;

 private:
  // Returns true if this source has to lock pages, because CUDA does not promise to.
  bool LocksPages() const;
  absl::StatusOr<void*> Pin(uint64_t size_bytes);
  absl::Status Unpin(void* data, uint64_t size_bytes);
  // Tries again to unpin what no caller knows of.
  void UnpinLeftOver();

  const CudaApi& api_;
  const int index_;
  const std::string sysfs_;
  const ForkOrigin origin_;
  std::atomic<bool> is_pinned_{true};      // false once the system has refused to lock pages
  std::atomic<bool> comes_aligned_{true};  // false once CUDA has returned unaligned memory
  Mutex mu_;
  // CUDA's unaligned allocations, by the aligned address inside that Allocate returned.
  std::map<void*, void*> unaligned_ ABSL_GUARDED_BY(mu_);
  // Unaligned allocations, with their sizes, that Allocate could not unpin.
  std::map<void*, uint64_t> left_over_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_CUDA_PINNED_SOURCE_H_
