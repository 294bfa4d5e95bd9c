#include "pinion/allocator/os/heap_source.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"

namespace pinion {

uint64_t HeapSource::granularity_bytes() const {
  return static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

absl::StatusOr<HostSegment> HeapSource::Allocate(uint64_t size_bytes) {
  void* data = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("mmap of ", HumanBytes(size_bytes), ": ", std::strerror(errno)));
  }
  return HostSegment{.data = data, .size_bytes = size_bytes};
}

absl::Status HeapSource::Free(const HostSegment& segment) {
  if (munmap(segment.data, segment.size_bytes) == 0) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("munmap of ", HumanBytes(segment.size_bytes), " at ",
                                          reinterpret_cast<uintptr_t>(segment.data), ": ",
                                          std::strerror(errno)));
}

}  // namespace pinion
