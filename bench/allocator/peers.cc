#include "pinion/bench/allocator/peers.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/host_memory_source.h"
#include "pinion/config/build_config.h"

namespace pinion {
namespace {

// For Pinion and the best-fit map: the traces are of small models.
constexpr uint64_t kSegmentBytes = std::min(config::kChunkBytes, 64 * kMiB);

// Opened at run time: linked, Debian's library would also replace malloc.
struct MimallocLibrary {
  MimallocLibrary() {
    void* const library = dlopen("libmimalloc.so.2", RTLD_NOW | RTLD_LOCAL);
    PINION_CHECK(library != nullptr) << dlerror() << "; install libmimalloc2.0";
    allocate = reinterpret_cast<void* (*)(size_t)>(dlsym(library, "mi_malloc"));
    free = reinterpret_cast<void (*)(void*)>(dlsym(library, "mi_free"));
    usable_size = reinterpret_cast<size_t (*)(const void*)>(dlsym(library, "mi_usable_size"));
    PINION_CHECK(allocate != nullptr && free != nullptr && usable_size != nullptr) << dlerror();
  }
  void* (*allocate)(size_t);
  void (*free)(void*);
  size_t (*usable_size)(const void*);
};

const MimallocLibrary& TheLibrary() {
  static const MimallocLibrary library;
  return library;
}

class UpstreamSource final : public HostMemorySource {
 public:
  explicit UpstreamSource(std::shared_ptr<HostUpstream> upstream)
      : upstream_(std::move(upstream)) {}

  std::string name() const override { return "host upstream"; }
  bool pinned() const override { return true; }
  uint64_t granularity_bytes() const override { return HostUpstream::kAlignment; }
  absl::StatusOr<HostSegment> Allocate(uint64_t size_bytes) override {
    return HostSegment{upstream_->Allocate(size_bytes), size_bytes, /*numa_node=*/-1};
  }
  absl::Status Free(const HostSegment& segment) override {
    upstream_->Free(segment.data, segment.size_bytes);
    return absl::OkStatus();
  }

 private:
  const std::shared_ptr<HostUpstream> upstream_;
};

}  // namespace

void* HostUpstream::Allocate(size_t size_bytes, size_t alignment) {
  void* const data = std::aligned_alloc(alignment, AlignUp(size_bytes, alignment));
  PINION_CHECK(data != nullptr) << "no host memory for " << size_bytes << " bytes";
  bytes_.fetch_add(size_bytes, std::memory_order_relaxed);
  calls_.fetch_add(1, std::memory_order_relaxed);
  return data;
}

void HostUpstream::Free(void* data, size_t size_bytes) {
  std::free(data);
  bytes_.fetch_sub(size_bytes, std::memory_order_relaxed);
}

PinionPeer::PinionPeer(std::shared_ptr<CopyClock> clock) : clock_(std::move(clock)) {
  AllocatorOptions options;
  // No limit by the host's RAM: the traces' gigabytes are never touched.
  options.warn_percent = options.high_percent = options.low_percent = 100;
  options.segment_bytes = kSegmentBytes;
  allocator_ =
      PinnedAllocator::Create(options, std::make_shared<UpstreamSource>(upstream_)).value();
}

BestFitPeer::~BestFitPeer() {
  MutexLock lock(mu_);
  for (const auto& [begin, size_bytes] : segments_) upstream_.Free(begin, size_bytes);
}

PlainBlock BestFitPeer::Allocate(uint64_t size_bytes) {
  const uint64_t rounded = AlignUp(size_bytes, 256);
  MutexLock lock(mu_);
  auto found = by_size_.lower_bound(rounded);
  if (found == by_size_.end()) {
    const uint64_t segment_bytes =
        AlignUp(std::max(kSegmentBytes, rounded), HostUpstream::kAlignment);
    char* const segment = static_cast<char*>(upstream_.Allocate(segment_bytes));
    segments_[segment] = segment_bytes;
    Insert(segment, segment_bytes);
    found = by_size_.lower_bound(rounded);
  }
  const auto [chunk_bytes, begin] = *found;
  by_address_.erase(begin);
  by_size_.erase(found);
  if (chunk_bytes > rounded) Insert(begin + rounded, chunk_bytes - rounded);
  return {begin, rounded};
}

void BestFitPeer::Free(Block block) {
  MutexLock lock(mu_);
  Insert(static_cast<char*>(block.data), block.size_bytes);
}

void BestFitPeer::Insert(char* begin, uint64_t size_bytes) {
  auto next = by_address_.lower_bound(begin);
  if (next != by_address_.begin()) {
    const auto previous = std::prev(next);
    const auto [previous_bytes, previous_begin] = *previous->second;
    if (previous_begin + previous_bytes == begin && !segments_.contains(begin)) {
      by_size_.erase(previous->second);
      by_address_.erase(previous);
      begin = previous_begin;
      size_bytes += previous_bytes;
    }
  }
  if (next != by_address_.end() && begin + size_bytes == next->first &&
      !segments_.contains(next->first)) {
    size_bytes += next->second->first;
    by_size_.erase(next->second);
    by_address_.erase(next);
  }
  by_address_[begin] = by_size_.emplace(size_bytes, begin);
}

void* Mimalloc::Allocate(size_t size_bytes) { return TheLibrary().allocate(size_bytes); }

void Mimalloc::Free(void* data) { TheLibrary().free(data); }

size_t Mimalloc::UsableSize(void* data) { return TheLibrary().usable_size(data); }

}  // namespace pinion
