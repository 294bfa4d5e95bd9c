#include "pinion/allocator/sources/address_range.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <iterator>

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
  free_[begin_] = size_bytes;
}

AddressRange::~AddressRange() {
  if (origin_.InForkedChild()) return;
  for (const auto& [data, free_bytes] : free_) munmap(data, free_bytes);
}

char* AddressRange::Take(uint64_t size_bytes) {
  MutexLock lock(mu_);
  for (auto stretch = free_.begin(); stretch != free_.end(); ++stretch) {
    const auto [data, free_bytes] = *stretch;
    if (free_bytes < size_bytes) continue;
    free_.erase(stretch);
    if (free_bytes > size_bytes) free_[data + size_bytes] = free_bytes - size_bytes;
    return data;
  }
  return nullptr;
}

void AddressRange::Return(char* data, uint64_t size_bytes) {
  MutexLock lock(mu_);
  auto after = free_.lower_bound(data);
  if (after != free_.end() && after->first == data + size_bytes) {
    size_bytes += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == data) {
      before->second += size_bytes;
      return;
    }
  }
  free_[data] = size_bytes;
}

}  // namespace pinion
