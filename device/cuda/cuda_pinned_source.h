// Page-locked host memory from cudaHostAlloc, usable by every CUDA device of the process.
//
// Memory comes from the NUMA node next to the device where the system lets the thread move there.
// Where the device reads the host's page tables (GH200), CUDA promises no lock, so the source locks
// the pages itself (mlock2). Once the system has refused that, pinned() is false: copies stay
// right, but the system may swap or move the pages.
//
// While the process exits, and in a child of fork(), Free leaves the memory to the operating
// system: the runtime may be gone, or is another process's. Allocate is refused there
// (FailedPrecondition).
//
// Thread safety: thread-safe. Pinning can stall other threads that use the driver, and freeing
// waits for the device.

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
  // Whether CUDA promises no lock.
  bool LocksPages() const;
  absl::StatusOr<void*> Pin(uint64_t size_bytes);
  absl::Status Unpin(void* data, uint64_t size_bytes);

  const CudaApi& api_;
  const int index_;
  const std::string sysfs_;
  const ForkOrigin origin_;
  std::atomic<bool> is_pinned_{true};      // falls once the system has refused to lock pages
  std::atomic<bool> comes_aligned_{true};  // falls once CUDA has returned other memory
  Mutex mu_;
  // What CUDA returned, by the aligned address inside it that was handed out; only where they
  // differ.
  std::map<void*, void*> unaligned_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_CUDA_PINNED_SOURCE_H_
