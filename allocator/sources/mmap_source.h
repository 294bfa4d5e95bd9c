// Host memory from mmap. It is pageable unless it is locked. device/cuda can register it as pinned
// memory.
//
//   MmapOptions options;
//   options.numa_node = device->info().numa_node;
//   options.touch_threads = 8;
//   PINION_ASSIGN_OR_RETURN(auto source, MmapSource::Create(options));
//   PINION_ASSIGN_OR_RETURN(auto allocator, PinnedAllocator::Create({}, std::move(source)));
//
// Pinned memory without a GPU, for RDMA or io_uring:
//
//   MmapOptions options;
//   options.lock = true;
//   PINION_ASSIGN_OR_RETURN(auto source, MmapSource::Create(options));
//
// Segments are adjacent if possible. A block may then cross segments, and varying shapes pin no
// more than their peak. For that the source reserves addresses for twice the host's memory, which
// cost nothing but show in the column VIRT of `top`. Exception: under a limit of address space
// (ulimit -v) it reserves none.
//
// Children of fork() do not inherit segments: copy-on-write would move the parent's pages while a
// device copies to them. In a child, an inherited source neither maps nor unmaps memory.
//
// Thread safety: thread-safe. Touching 1 GiB takes about a second.

#ifndef PINION_ALLOCATOR_SOURCES_MMAP_SOURCE_H_
#define PINION_ALLOCATOR_SOURCES_MMAP_SOURCE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/fork_origin.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/host_memory_source.h"

namespace pinion {

struct MmapOptions {
  // The NUMA node to take memory from while it has any, then from the nearest nodes. The cpuset
  // must allow it. -1: the node of the touching thread. HostSegment::numa_node tells where the
  // memory is. In a container that forbids the choice (Docker without CAP_SYS_NICE), memory comes
  // from any node, and the log says so once.
  int numa_node = -1;

  // Threads that touch every page of a new segment, so that its memory is committed and the host's
  // figures show it. With numa_node they run on that node's CPUs. Measure whether more threads are
  // faster. 0: pages are committed by their first use, and a host without memory then kills the
  // process.
  int touch_threads = 1;

  // Requests 2 MiB pages (MADV_HUGEPAGE). They are about twice as fast to touch and to pin if the
  // host's memory is not fragmented, and several times slower if it is. Off: the system's default.
  bool huge_pages = false;

  // Locks the pages in RAM (mlock2): they are committed and never swapped out. They count against
  // RLIMIT_MEMLOCK (ulimit -l) unless the process has CAP_IPC_LOCK. Off: PinnedBlock::pinned() is
  // false.
  bool lock = false;

  // Returns InvalidArgument with the field, its value and its bounds.
  absl::Status Validate() const;
};

// A reserved range of addresses, so that memory that is mapped in pieces is contiguous.
//
//   AddressRange range(64 * kGiB);
//   char* at = range.Take(kGiB);        // the lowest free addresses; map memory there
//   ...
//   range.Return(at);                   // nothing is mapped there any more
//
// Thread safety: thread-safe. Ownership: the destructor unmaps free addresses. Memory at other
// addresses stays mapped, because a device may be writing to it. A child of fork() does not inherit
// the range.
class AddressRange {
 public:
  // Begins at a multiple of 1 GiB and has whole pages. Empty if the system refuses so many
  // addresses. Also empty under a limit of address space (ulimit -v), which the rest of the program
  // needs.
  explicit AddressRange(uint64_t size_bytes);
  ~AddressRange();
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;

  // Takes whole pages. Returns null if no free part is long enough. size_bytes must be positive.
  char* Take(uint64_t size_bytes);
  // Returns all that one Take gave. `data` must be what it returned.
  void Return(char* data);

  bool Contains(const void* data) const { return data >= begin_ && data < end_; }

 private:
  const ForkOrigin origin_;
  char* begin_ = nullptr;
  char* end_ = nullptr;

  Mutex mu_;
  std::map<char*, uint64_t> taken_ ABSL_GUARDED_BY(mu_);  // bytes of each part, by address
};

class MmapSource final : public HostMemorySource {
 public:
  static absl::StatusOr<std::shared_ptr<MmapSource>> Create(const MmapOptions& options = {});

  std::string name() const override { return options_.lock ? "mlock" : "mmap"; }
  bool pinned() const override { return options_.lock; }
  uint64_t granularity_bytes() const override { return uint64_t{2} << 20; }
  bool JoinsAt(const void* /*border*/) const override { return true; }
  // Errors: InvalidArgument unless size_bytes is a positive multiple of the granularity.
  // ResourceExhausted, with the size and the limit to check, if the system has no memory or no
  // addresses, or locks no more. FailedPrecondition if the cpuset has lost the NUMA node, and in
  // a child of fork() that inherited the source.
  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override;
  // InvalidArgument, and unmaps nothing, unless the segment is one of this source that is in use.
  absl::Status Free(const HostSegment& segment) override;

 private:
  explicit MmapSource(const MmapOptions& options);

  // Returns addresses to map memory at, or null if there are none.
  char* TakeAddresses(uint64_t size_bytes);
  absl::Status ReturnAddresses(char* data, uint64_t size_bytes);

  const MmapOptions options_;
  const ForkOrigin origin_;
  AddressRange range_;
  Mutex mu_;
  std::map<void*, uint64_t> in_use_ ABSL_GUARDED_BY(mu_);  // bytes of each segment, by address
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_SOURCES_MMAP_SOURCE_H_
