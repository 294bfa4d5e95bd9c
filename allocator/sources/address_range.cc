#include "pinion/allocator/sources/address_range.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include "pinion/allocator/base/bytes.h"

namespace pinion {
namespace {

// Reserved addresses count against the limit (ulimit -v).
bool AddressesAreLimited() {
  rlimit limit = {};
  getrlimit(RLIMIT_AS, &limit);
  return limit.rlim_cur != RLIM_INFINITY;
}

}  // namespace

AddressRange::AddressRange(uint64_t size_bytes) {
  if (AddressesAreLimited()) return;
  const uint64_t mapped_bytes = size_bytes + kGiB;
  void* const mapped =
      mmap(nullptr, mapped_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return;
  char* const mapped_end = static_cast<char*>(mapped) + mapped_bytes;
  begin_ = reinterpret_cast<char*>(AlignUp(reinterpret_cast<uintptr_t>(mapped), kGiB));
  end_ = begin_ + size_bytes;
  if (begin_ != mapped) munmap(mapped, begin_ - static_cast<char*>(mapped));
  munmap(end_, mapped_end - end_);
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
  MutexLock lock(mu_);
  taken_.erase(data);
}

}  // namespace pinion
