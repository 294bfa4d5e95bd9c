// A CUDA GPU as a Device: streams, events, cudaMallocAsync memory and cudaMemcpyAsync copies, and
// the page-locked host memory that it copies from and to.
//
// Thread safety: thread-safe, like the CUDA runtime. Pinning can stall other driver users; freeing
// pinned memory waits for the device.

#ifndef PINION_DEVICE_CUDA_CUDA_DEVICE_H_
#define PINION_DEVICE_CUDA_CUDA_DEVICE_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/fork_origin.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/device/cuda/cuda_api.h"
#include "pinion/device/device.h"

namespace pinion {

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
// Free returns InvalidArgument, and frees nothing, unless the segment is one of this source that is
// in use. Memory that CUDA refuses to free stays pinned. A repeated Free may free it.
//
// While the process exits, and in a child of fork(), Free leaves the memory to the operating
// system, and Allocate returns FailedPrecondition.
class CudaPinnedSource final : public HostMemorySource {
 public:
  // Pins through device `index`; `api` outlives the source and has all functions. Tests inject
  // another `sysfs`.
  CudaPinnedSource(const CudaApi& api, int index, const std::string& sysfs = "/sys");

  std::string name() const override { return "cudaHostAlloc"; }
  bool pinned() const override { return is_pinned_.load(std::memory_order_relaxed); }
  uint64_t granularity_bytes() const override { return uint64_t{2} << 20; }
  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override;
  absl::Status Free(const HostSegment& segment) override;

 private:
  struct Pinned {  // what CUDA returned
    void* data = nullptr;
    uint64_t size_bytes = 0;
  };
  struct InUse {
    uint64_t size_bytes = 0;  // of the segment, which lies in `pinned`
    Pinned pinned;
  };

  HostSegment HandOut(void* data, uint64_t size_bytes, const Pinned& pinned);
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
  // Segments that Allocate returned, by address.
  std::map<void*, InUse> in_use_ ABSL_GUARDED_BY(mu_);
  // Unaligned allocations, with their sizes, that Allocate could not unpin.
  std::map<void*, uint64_t> left_over_ ABSL_GUARDED_BY(mu_);
};

// Each call makes its device current and restores the calling thread's device. Streams are
// non-blocking. Device memory comes from the device's default pool. LibTorch programs use that pool
// only for memory that Pinion itself needs.
//
// A copy makes one cudaMemcpyAsync call per piece. If a copy of several pieces fails, CopyAsync
// waits for the stream, because it has enqueued the pieces before the failed one.
//
// `api` outlives the device. The caller has checked that `index` exists (cuda_backend.h).
class CudaDevice final : public Device {
 public:
  CudaDevice(const CudaApi& api, int index);

  std::string name() const override;
  DeviceInfo info() const override;

  absl::StatusOr<void*> Allocate(uint64_t size_bytes, StreamHandle stream) override;
  absl::Status Free(void* data, StreamHandle stream) override;
  std::shared_ptr<HostMemorySource> pinned_source() override { return pinned_source_; }

  absl::StatusOr<StreamHandle> CreateStream(const std::string& name) override;
  absl::Status DestroyStream(StreamHandle stream) override;
  absl::Status SynchronizeStream(StreamHandle stream) override;
  absl::StatusOr<bool> IsCapturing(StreamHandle stream) override;

  absl::StatusOr<EventHandle> CreateEvent() override;
  absl::StatusOr<EventHandle> CreateTimedEvent() override;
  absl::Status DestroyEvent(EventHandle event) override;
  absl::Status RecordEvent(EventHandle event, StreamHandle stream) override;
  absl::Status StreamWaitEvent(StreamHandle stream, EventHandle event) override;
  absl::StatusOr<bool> QueryEvent(EventHandle event) override;
  absl::Status WaitEvent(EventHandle event, absl::Duration timeout) override;

  absl::StatusOr<double> ElapsedMs(EventHandle start, EventHandle end) override;

  absl::Status CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                         StreamHandle stream) override;

 private:
  // Calls `function` with this device current and converts its error. Restores the thread's device.
  template <typename Function>
  absl::Status Call(const char* name, const Function& function) const;
  // Like Call, for functions that CUDA considers unsafe while another stream captures a graph.
  template <typename Function>
  absl::Status CallRelaxed(const char* name, const Function& function) const;
  absl::StatusOr<EventHandle> NewEvent(unsigned int flags);

  const CudaApi& api_;
  const int index_;
  const std::shared_ptr<HostMemorySource> pinned_source_;
};

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_CUDA_DEVICE_H_
