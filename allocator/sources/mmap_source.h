// Host memory from mmap: pageable unless it is locked, and what device/cuda registers as pinned
// memory.
//
//   MmapOptions options;
//   options.numa_node = device->info().numa_node;
//   options.touch_threads = 8;
//   PINION_ASSIGN_OR_RETURN(auto source, MmapSource::Create(options));
//   PINION_ASSIGN_OR_RETURN(auto allocator, PinnedAllocator::Create({}, std::move(source)));
//
// Pinned memory without a GPU, as RDMA and io_uring want it:
//
//   MmapOptions options;
//   options.lock = true;
//   PINION_ASSIGN_OR_RETURN(auto source, MmapSource::Create(options));
//
// Segments lie side by side where that can be had, so that a block may cross from one into the next
// and a run whose shapes vary pins no more than its peak. For that, addresses for twice the host's
// memory are set aside; they cost nothing but a large number in the column VIRT of `top`. Under a
// limit of address space (ulimit -v) none are: segments lie where they happen to.
//
// A segment is not inherited by children of fork(): copy-on-write would move the parent's pages
// away from under a device that copies to them. A child may have mapped something else at its
// address, so an inherited source unmaps nothing, and maps nothing that it could not unmap.
//
// Thread safety: thread-safe. Touching 1 GiB takes a second or so.

#ifndef PINION_ALLOCATOR_SOURCES_MMAP_SOURCE_H_
#define PINION_ALLOCATOR_SOURCES_MMAP_SOURCE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/fork_origin.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/allocator/sources/address_range.h"

namespace pinion {

struct MmapOptions {
  // The NUMA node that gives the memory while it has any (then the nearest others do); where it
  // really came from is HostSegment::numa_node. A node with memory that the cpuset of this process
  // allows. Containers may forbid the choice (Docker without CAP_SYS_NICE): then the log says once
  // that memory comes from any node. -1: the node of the thread that touches it.
  int numa_node = -1;

  // Threads that touch every page when a segment is made, so that the memory is there at once and
  // the host's figures show it; with numa_node they run on the CPUs of that node. Whether more of
  // them are faster depends on the host: measure. 0: pages come with their first use; a host that
  // has none left then kills the process.
  int touch_threads = 1;

  // Asks for 2 MiB pages (MADV_HUGEPAGE): about twice as fast to touch and to pin on a host whose
  // memory is not fragmented, several times slower on one where it is. Off: what the system does
  // unasked.
  bool huge_pages = false;

  // Locks the pages in RAM (mlock2): all are there when the segment is, and none is swapped out.
  // They count against RLIMIT_MEMLOCK (ulimit -l) unless the process has CAP_IPC_LOCK. Off: the
  // memory is not pinned, and PinnedBlock::pinned() says so. Not for a source that is registered
  // with CUDA, which locks by itself.
  bool lock = false;

  // InvalidArgument that names the field, its value and what it must be.
  absl::Status Validate() const;
};

class MmapSource final : public HostMemorySource {
 public:
  static absl::StatusOr<std::shared_ptr<MmapSource>> Create(const MmapOptions& options = {});

  std::string name() const override { return options_.lock ? "mlock" : "mmap"; }
  bool pinned() const override { return options_.lock; }
  uint64_t granularity_bytes() const override { return uint64_t{2} << 20; }
  bool JoinsAt(const void* /*border*/) const override { return true; }
  // ResourceExhausted where the system has no memory or no addresses, or locks no more: the message
  // names the size and the limit to look at. FailedPrecondition where the cpuset of this process
  // has lost the NUMA node, and in a child of fork() that inherited the source.
  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override;
  absl::Status Free(const HostSegment& segment) override;

 private:
  explicit MmapSource(const MmapOptions& options);

  // Addresses, with nothing mapped there that would be missed. Null if there are none.
  char* TakeAddresses(uint64_t size_bytes);
  absl::Status ReturnAddresses(char* data, uint64_t size_bytes);

  const MmapOptions options_;
  const ForkOrigin origin_;
  AddressRange range_;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_SOURCES_MMAP_SOURCE_H_
