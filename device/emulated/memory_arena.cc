#include "pinion/device/emulated/memory_arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>

#include "pinion/allocator/base/bytes.h"

namespace pinion {

void FreePool::Erase(ByOffset::iterator it) {
  by_size_.erase(Key(it));
  by_offset_.erase(it);
}

void FreePool::Add(uint64_t offset, uint64_t size_bytes) {
  auto next = by_offset_.lower_bound(offset);
  if (next != by_offset_.end() && offset + size_bytes == next->first) {
    size_bytes += next->second.size_bytes;
    auto merged = next++;
    Erase(merged);
  }
  if (next != by_offset_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second.size_bytes == offset) {
      offset = previous->first;
      size_bytes += previous->second.size_bytes;
      Erase(previous);
    }
  }
  auto it = by_offset_.emplace(offset, Range{size_bytes, next_age_--}).first;
  by_size_.insert(Key(it));
}

bool FreePool::Take(uint64_t size_bytes, uint64_t* offset) {
  auto fit = by_size_.lower_bound({size_bytes, 0, 0});
  if (fit == by_size_.end()) return false;
  auto it = by_offset_.find(std::get<2>(*fit));
  *offset = it->first;
  const Range range = it->second;
  Erase(it);
  if (range.size_bytes > size_bytes) {
    auto rest =
        by_offset_.emplace(*offset + size_bytes, Range{range.size_bytes - size_bytes, range.age})
            .first;
    by_size_.insert(Key(rest));
  }
  return true;
}

uint64_t FreePool::BestFit(uint64_t size_bytes) const {
  auto fit = by_size_.lower_bound({size_bytes, 0, 0});
  return fit == by_size_.end() ? 0 : std::get<0>(*fit);
}

void FreePool::MoveTo(FreePool& other) {
  for (const auto& [offset, range] : by_offset_) other.Add(offset, range.size_bytes);
  by_offset_.clear();
  by_size_.clear();
}

MemoryArena::MemoryArena(void* mapping, uint64_t reserve_bytes, bool quarantine)
    : base_(static_cast<char*>(mapping)), reserve_bytes_(reserve_bytes), quarantines_(quarantine) {
  common_.Add(0, reserve_bytes);
}

bool MemoryArena::MakeWritable(uint64_t end) {
  if (end <= writable_bytes_) return true;
  constexpr uint64_t kStepBytes = 16 * kMiB;
  const uint64_t wanted_bytes = std::min(AlignUp(end, kStepBytes), reserve_bytes_);
  if (mprotect(base_ + writable_bytes_, wanted_bytes - writable_bytes_, PROT_READ | PROT_WRITE) !=
      0) {
    return false;
  }
  writable_bytes_ = wanted_bytes;
  return true;
}

MemoryArena::~MemoryArena() { munmap(base_, reserve_bytes_); }

FreePool& MemoryArena::PoolOf(int stream) {
  if (stream >= stream_count()) pools_.resize(stream + 1);
  return pools_[stream];
}

void* MemoryArena::Allocate(uint64_t size_bytes, int stream, uint64_t capacity_bytes) {
  size_bytes = AlignUp(size_bytes, kAlignment);
  while (!quarantine_.empty() && live_bytes_ + quarantined_bytes_ + size_bytes > capacity_bytes) {
    const Quarantined& oldest = quarantine_.front();
    PoolOf(oldest.stream).Add(oldest.offset, oldest.size_bytes);
    quarantined_bytes_ -= oldest.size_bytes;
    quarantine_.pop_front();
  }
  FreePool& own = PoolOf(stream);
  const uint64_t own_fit = own.BestFit(size_bytes);
  const uint64_t common_fit = common_.BestFit(size_bytes);
  uint64_t offset = 0;
  const bool prefer_own = own_fit != 0 && (common_fit == 0 || own_fit <= common_fit);
  FreePool& pool = prefer_own ? own : common_;
  if (!pool.Take(size_bytes, &offset)) return nullptr;
  if (!MakeWritable(offset + size_bytes)) {
    pool.Add(offset, size_bytes);
    return nullptr;
  }
  live_bytes_ += size_bytes;
  return base_ + offset;
}

void MemoryArena::Free(void* data, uint64_t size_bytes, int stream) {
  size_bytes = AlignUp(size_bytes, kAlignment);
  const uint64_t offset = static_cast<char*>(data) - base_;
  live_bytes_ -= size_bytes;
  if (quarantines_) {
    quarantine_.push_back({offset, size_bytes, stream});
    quarantined_bytes_ += size_bytes;
  } else {
    PoolOf(stream).Add(offset, size_bytes);
  }
}

void MemoryArena::Publish(int stream) { PoolOf(stream).MoveTo(common_); }

}  // namespace pinion
