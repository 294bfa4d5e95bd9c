// Page-locked host memory that is mapped here and registered with CUDA (cudaHostRegister): memory
// of a chosen NUMA node, touched by several threads and in huge pages where that is asked for.
// It copies as fast as cudaHostAlloc's and may be pinned several times faster; which of the two
// wins on a host only a measurement tells (bench/).
//
//   MmapOptions memory;
//   memory.numa_node = device->info().numa_node;
//   memory.touch_threads = 8;
//   PINION_ASSIGN_OR_RETURN(auto source, CudaRegisteredSource::Create(RealCudaApi(), 0, memory));
//   PINION_ASSIGN_OR_RETURN(auto allocator, PinnedAllocator::Create({}, std::move(source)));
//
// Registering holds a lock of the driver that stops every process on the host, and fails from
// 512 GiB on, so segments of more than 1 GiB are registered piece by piece, at addresses that are
// multiples of kRegistrationBytes. cudaMemcpyBatchAsync refuses a piece that spans two
// registrations (sglang#36798): CudaDevice splits copies at those addresses, and whoever else
// copies a block that crosses one must do the same. For that reason segments that lie side by side
// are joined at those addresses only.
//
// While the process exits, and in a child of fork, Free leaves the memory to the operating system:
// the runtime may be gone, or is another process's; the child has no copy of the memory. Allocate
// is refused there (FailedPrecondition).
//
// Thread safety: thread-safe. Pinning can stall other threads that use the driver, and freeing
// waits for the device.

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

// The most that one cudaHostRegister call gets.
inline constexpr uint64_t kRegistrationBytes = uint64_t{1} << 30;

// The end of the part of [data, data + size_bytes) up to which no border of registrations lies
// inside: at most size_bytes.
uint64_t BytesToRegistrationBorder(const void* data, uint64_t size_bytes);

class CudaRegisteredSource final : public HostMemorySource {
 public:
  // Registers through device `index`; `api` outlives the source. InvalidArgument for bad options.
  // FailedPrecondition where the device sees registered memory at another address than the host
  // does (WSL2), because its copies in batches would go astray (sglang#40232), and where the device
  // uses the host's page tables (GH200, GB200), because CUDA does not lock the pages then. Use
  // CudaPinnedSource there.
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
  // All registrations of the first `size_bytes`; the first error.
  absl::Status Unregister(const HostSegment& segment, uint64_t size_bytes);

  const CudaApi& api_;
  const int index_;
  const std::shared_ptr<MmapSource> memory_;
  const ForkOrigin origin_;
};

}  // namespace pinion

#endif  // PINION_DEVICE_CUDA_CUDA_REGISTERED_SOURCE_H_
