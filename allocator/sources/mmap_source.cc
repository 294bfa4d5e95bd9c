#include "pinion/allocator/sources/mmap_source.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/allocator/sources/numa.h"
#include "pinion/allocator/sources/page_lock.h"

namespace pinion {
namespace {

// Bytes that a thread touches at a time: a huge page.
constexpr uint64_t kTouchBytes = 2 * kMiB;

// Maps private memory. Returns MAP_FAILED like mmap.
void* Map(void* at, uint64_t size_bytes, int protection, int flags) {
  return mmap(at, size_bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
}

// Returns addresses from a multiple of `alignment_bytes` on, where nothing can be read or written.
// Null if the system refuses. mmap aligns to pages only: the parts before and after are unmapped.
char* SetAside(uint64_t size_bytes, uint64_t alignment_bytes) {
  if (size_bytes > UINT64_MAX - alignment_bytes) {
    errno = ENOMEM;
    return nullptr;
  }
  void* const mapped = Map(nullptr, size_bytes + alignment_bytes, PROT_NONE, MAP_NORESERVE);
  if (mapped == MAP_FAILED) return nullptr;
  char* const begin = static_cast<char*>(mapped);
  char* const data =
      reinterpret_cast<char*>(AlignUp(reinterpret_cast<uintptr_t>(mapped), alignment_bytes));
  munmap(begin, data - begin);
  munmap(data + size_bytes, begin + alignment_bytes - data);
  return data;
}

// Reserved addresses count against the limit (ulimit -v).
bool AddressesAreLimited() {
  rlimit limit = {};
  getrlimit(RLIMIT_AS, &limit);
  return limit.rlim_cur != RLIM_INFINITY;
}

uint64_t PageBytes() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

uint64_t PhysicalBytes() { return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * PageBytes(); }

// Commits the pages of the range. Returns 0 or an errno.
int TouchPages(char* data, uint64_t size_bytes) {
  if (madvise(data, size_bytes, MADV_POPULATE_WRITE) == 0) return 0;
  if (errno != EINVAL) return errno;
  // Kernels before 5.14 lack MADV_POPULATE_WRITE.
  const uint64_t page_bytes = PageBytes();
  for (volatile char* page = data; page < data + size_bytes; page += page_bytes) *page = 0;
  return 0;
}

// Commits the pages by `thread_count` threads, including this one.
int TouchTogether(char* data, uint64_t size_bytes, int thread_count, int numa_node) {
  std::atomic<uint64_t> next = 0;
  std::atomic<int> error = 0;
  const auto touch = [&] {
    const ScopedNumaThread near(numa_node);
    while (error.load(std::memory_order_relaxed) == 0) {
      const uint64_t at = next.fetch_add(kTouchBytes, std::memory_order_relaxed);
      if (at >= size_bytes) return;
      int none = 0;  // keep the first error
      error.compare_exchange_strong(none,
                                    TouchPages(data + at, std::min(kTouchBytes, size_bytes - at)));
    }
  };
  std::vector<std::thread> others;
  const uint64_t useful = std::min<uint64_t>(thread_count, size_bytes / kTouchBytes);
  try {
    while (others.size() + 1 < useful) others.emplace_back(touch);
  } catch (const std::system_error&) {
    // The host has no more threads. The existing ones do the work.
  }
  touch();
  for (std::thread& other : others) other.join();
  return error.load();
}

absl::Status NoMemory(const std::string& what, uint64_t size_bytes, int error) {
  return absl::ResourceExhaustedError(
      absl::StrCat(what, " of ", HumanBytes(size_bytes), ": ", std::strerror(error),
                   "; look at the host's free memory, the limit of address space (ulimit -v) and "
                   "vm.overcommit_memory, or lower AllocatorOptions::max_locked_bytes"));
}

}  // namespace

AddressRange::AddressRange(uint64_t size_bytes) {
  if (AddressesAreLimited()) return;
  size_bytes = AlignUp(size_bytes, PageBytes());  // 0 if no addresses have so much
  begin_ = SetAside(size_bytes, kGiB);
  if (begin_ == nullptr) return;
  end_ = begin_ + size_bytes;
  madvise(begin_, size_bytes, MADV_DONTFORK);
}

AddressRange::~AddressRange() {
  if (origin_.InForkedChild()) return;
  char* free = begin_;
  for (const auto& [data, size_bytes] : taken_) {
    munmap(free, data - free);
    free = data + size_bytes;
  }
  munmap(free, end_ - free);
}

char* AddressRange::Take(uint64_t size_bytes) {
  PINION_CHECK(size_bytes > 0) << "AddressRange::Take of 0 bytes; take 1 or more";
  if (size_bytes > static_cast<uint64_t>(end_ - begin_)) return nullptr;
  size_bytes = AlignUp(size_bytes, PageBytes());
  MutexLock lock(mu_);
  char* free = begin_;
  for (const auto& [data, taken_bytes] : taken_) {
    if (static_cast<uint64_t>(data - free) >= size_bytes) break;
    free = data + taken_bytes;
  }
  if (static_cast<uint64_t>(end_ - free) < size_bytes) return nullptr;
  taken_[free] = size_bytes;
  return free;
}

void AddressRange::Return(char* data) {
  size_t returned = 0;
  {
    MutexLock lock(mu_);
    returned = taken_.erase(data);
  }
  PINION_CHECK(returned == 1) << "AddressRange::Return of " << static_cast<void*>(data)
                              << ": Take did not return it, or Return had it before: return each "
                                 "address that Take returned once";
}

absl::Status MmapOptions::Validate() const {
  PINION_RETURN_IF_ERROR(CheckNumaNode(numa_node));
  if (touch_threads < 0 || touch_threads > 1024) {
    return absl::InvalidArgumentError(
        absl::StrCat("touch_threads is ", touch_threads, "; it must lie between 0 and 1024"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<MmapSource>> MmapSource::Create(const MmapOptions& options) {
  PINION_RETURN_IF_ERROR(options.Validate());
  return std::shared_ptr<MmapSource>(new MmapSource(options));
}

MmapSource::MmapSource(const MmapOptions& options)
    : options_(options), range_(2 * AlignUp(PhysicalBytes(), kGiB)) {}

char* MmapSource::TakeAddresses(uint64_t size_bytes) {
  if (char* const data = range_.Take(size_bytes); data != nullptr) return data;
  return SetAside(size_bytes, granularity_bytes());
}

absl::Status MmapSource::ReturnAddresses(char* data, uint64_t size_bytes) {
  if (!range_.Contains(data)) {
    if (munmap(data, size_bytes) == 0) return absl::OkStatus();
  } else if (Map(data, size_bytes, PROT_NONE, MAP_NORESERVE | MAP_FIXED) != MAP_FAILED) {
    madvise(data, size_bytes, MADV_DONTFORK);
    range_.Return(data);
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat("unmapping ", HumanBytes(size_bytes), " at ",
                                          reinterpret_cast<uintptr_t>(data), ": ",
                                          std::strerror(errno)));
}

absl::StatusOr<HostSegment> MmapSource::Allocate(uint64_t size_bytes) {
  PINION_RETURN_IF_ERROR(CheckSize(size_bytes));
  if (origin_.InForkedChild()) return origin_.Refusal("a source of mapped memory");
  char* const data = TakeAddresses(size_bytes);
  if (data == nullptr) return NoMemory("mmap", size_bytes, errno);
  absl::Cleanup unmap = [&] { ReturnAddresses(data, size_bytes).IgnoreError(); };
  if (Map(data, size_bytes, PROT_READ | PROT_WRITE, MAP_FIXED) == MAP_FAILED) {
    return NoMemory("mmap", size_bytes, errno);
  }
  if (madvise(data, size_bytes, MADV_DONTFORK) != 0) {
    return absl::InternalError(absl::StrCat("madvise(MADV_DONTFORK): ", std::strerror(errno)));
  }
  // A kernel without huge pages refuses, which does no harm.
  if (options_.huge_pages) madvise(data, size_bytes, MADV_HUGEPAGE);
  if (options_.numa_node >= 0) {
    PINION_RETURN_IF_ERROR(PreferNumaNode(data, size_bytes, options_.numa_node));
  }
  // A limit should refuse before touching the pages takes a second.
  if (options_.lock) PINION_RETURN_IF_ERROR(LockPages(data, size_bytes, MLOCK_ONFAULT));
  if (options_.touch_threads > 0) {
    const int error = TouchTogether(data, size_bytes, options_.touch_threads, options_.numa_node);
    if (error != 0) return NoMemory("touching the pages", size_bytes, error);
  }
  if (options_.lock) PINION_RETURN_IF_ERROR(LockPages(data, size_bytes, /*flags=*/0));
  const int node = NumaNodeOf(data, size_bytes, granularity_bytes());  // may throw
  {
    const MutexLock lock(mu_);
    in_use_[data] = size_bytes;  // may throw
  }
  std::move(unmap).Cancel();
  return HostSegment{data, size_bytes, node};
}

absl::Status MmapSource::Free(const HostSegment& segment) {
  if (origin_.InForkedChild()) return absl::OkStatus();
  std::map<void*, uint64_t>::node_type freed;
  {
    const MutexLock lock(mu_);
    const auto found = in_use_.find(segment.data);
    if (found == in_use_.end() || found->second != segment.size_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(
          "MmapSource::Free: this source has no segment of ", HumanBytes(segment.size_bytes),
          " in use at 0x", absl::Hex(reinterpret_cast<uintptr_t>(segment.data)),
          "; pass each segment that its Allocate returned, unchanged and once"));
    }
    freed = in_use_.extract(found);
  }
  absl::Status unmapped = ReturnAddresses(static_cast<char*>(segment.data), segment.size_bytes);
  if (!unmapped.ok()) {
    // The segment is still mapped, and a repeated Free names the same address.
    const MutexLock lock(mu_);
    in_use_.insert(std::move(freed));
  }
  return unmapped;
}

}  // namespace pinion
