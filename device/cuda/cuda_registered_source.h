// Allocates page-locked host memory that is mapped by Pinion and registered with CUDA
// (cudaHostRegister): on a chosen NUMA node, in huge pages, touched by several threads.
//
//   MmapOptions memory;
//   memory.numa_node = device->info().numa_node;
//   memory.touch_threads = 8;
//   PINION_ASSIGN_OR_RETURN(auto source, CudaRegisteredSource::Create(RealCudaApi(), 0, memory));
//   PINION_ASSIGN_OR_RETURN(auto allocator, PinnedAllocator::Create({}, std::move(source)));
//
// Copies are as fast as with cudaHostAlloc, and pinning may be several times faster. Measure both
// on your host (bench/).
//
// Registering holds a driver lock that stops every process on the host, and fails from 512 GiB on.
// So segments above 1 GiB are registered in parts that end at multiples of kRegistrationBytes.
// cudaMemcpyBatchAsync refuses a piece that spans two registrations (sglang#36798). CudaDevice
// splits copies at these borders; code that copies such blocks by itself must split them too.
// Neighbouring segments are joined at these borders only.
//
// While the process exits, and in a child of fork(), Free leaves the memory to the operating
// system, and Allocate returns FailedPrecondition. A child has no copy of the memory.
//
// Thread safety: thread-safe. Pinning can stall other driver users; freeing waits for the device.

#ifndef PINION_DEVICE_CUDA_CUDA_REGISTERED_SOURCE_H_
#define PINION_DEVICE_CUDA_CUDA_REGISTERED_SOURCE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/fork_origin.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/sources/mmap_source.h"
#include "pinion/device/cuda/cuda_api.h"

namespace pinion {

// Largest size of one cudaHostRegister call.
inline constexpr uint64_t kRegistrationBytes = uint64_t{1} << 30;

// Returns the bytes from `data` to the next registration border, at most size_bytes.
uint64_t BytesToRegistrationBorder(const void* data, uint64_t size_bytes);

class CudaRegisteredSource final : public HostMemorySource {
 public:
  // Creates a source that registers through device `index`; `api` outlives the source.
  // InvalidArgument for bad options. FailedPrecondition on two kinds of systems, which need
  // CudaPinnedSource instead:
  //   WSL2          the device sees registered memory at another address; batch copies go astray
  //                 (sglang#40232)
  //   GH200, GB200  the device uses the host's page tables, and CUDA does not lock the pages
  static absl::StatusOr<std::shared_ptr<CudaRegisteredSource>> Create(
      const CudaApi& api, int index, const MmapOptions& memory = {});

  std::string name() const override { return "cudaHostRegister"; }
  bool pinned() const override { return true; }
  uint64_t granularity_bytes() const override { return memory_->granularity_bytes(); }
  bool JoinsAt(const void* border) const override;
  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override;
  absl::Status Free(const HostSegment& segment) override;

 private:
  CudaRegisteredSource(const CudaApi& api, int index, std::shared_ptr<MmapSource> memory);

  absl::Status Register(const HostSegment& segment);
  // Unregisters the first `size_bytes` of the segment. Returns the first error.
  absl::Status Unregister(const HostSegment& segment, uint64_t size_bytes);

  const CudaApi& api_;
  const int index_;
  const std::shared_ptr<MmapSource> memory_;
  const ForkOrigin origin_;
};

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_CUDA_REGISTERED_SOURCE_H_
