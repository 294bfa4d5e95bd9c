#include "pinion/hooks/plan/known_storages.h"

#include <c10/core/Allocator.h>

#include <algorithm>
#include <utility>

#include "pinion/allocator/base/check.h"
#include "pinion/device/allocation_bytes.h"

namespace pinion {

uint64_t UnionBytes(std::vector<StorageExtent> extents) {
  std::sort(extents.begin(), extents.end(), [](const StorageExtent& a, const StorageExtent& b) {
    return a.begin_bytes < b.begin_bytes;
  });
  uint64_t bytes = 0;
  uint64_t counted_to = 0;
  for (const StorageExtent& extent : extents) {
    if (extent.end_bytes <= counted_to) continue;
    bytes += extent.end_bytes - std::max(extent.begin_bytes, counted_to);
    counted_to = extent.end_bytes;
  }
  return bytes;
}

KnownStorages::Bytes KnownStorages::CountAt(int64_t allocated_bytes) {
  std::erase_if(living_, [this](Id id) { return CountOutIfGone(id); });
  return {allocated_bytes, static_cast<int64_t>(living_bytes_)};
}

KnownStorages::Bytes KnownStorages::CountAfter(int64_t allocated_bytes,
                                               absl::Span<const void* const> freed) {
  for (const void* data : freed) {
    const auto found = by_data_.find(data);
    if (found == by_data_.end()) continue;
    if (!CountOutIfGone(found->second)) untold_.push_back(found->second);  // it has other memory
    by_data_.erase(found);
  }
  std::erase_if(untold_, [this](Id id) { return CountOutIfGone(id); });
  return {allocated_bytes, static_cast<int64_t>(living_bytes_)};
}

bool KnownStorages::CountOutIfGone(Id id) {
  Storage& storage = storages_[id];
  if (!storage.is_living) return true;
  if (!storage.reference.expired()) return false;
  storage.is_living = false;
  living_bytes_ -= storage.size_bytes;
  held_bytes_ -= storage.held_bytes;
  return true;
}

void KnownStorages::NoteAllocations(const Bytes& begin, const Bytes& end) {
  ahead_bytes_ += end.allocated - begin.allocated - (end.known - begin.known);
}

int64_t KnownStorages::OtherBytes(const Bytes& end) const {
  return end.allocated - static_cast<int64_t>(held_bytes_) - ahead_bytes_;
}

KnownStorages::Id KnownStorages::FindOrAdd(const c10::Storage& storage) {
  const auto [found, is_new] = ids_.try_emplace(storage.unsafeGetStorageImpl(), storages_.size());
  if (is_new) {
    living_bytes_ += storages_.emplace_back(storage).size_bytes;
    living_.push_back(found->second);
    NoteData(storage, found->second);
  }
  return found->second;
}

void KnownStorages::NoteData(const c10::Storage& storage, Id id) {
  const c10::DataPtr& data = storage.data_ptr();
  const c10::Allocator* const allocator = c10::GetAllocator(storage.device_type());
  if (data.get() == nullptr || data.get_deleter() != allocator->raw_deleter()) {
    untold_.push_back(id);
    return;
  }
  const auto [found, is_only] = by_data_.try_emplace(data.get(), id);
  // What was known there has gone, or has other memory by now.
  if (!is_only) untold_.push_back(std::exchange(found->second, id));
}

void KnownStorages::NoteRead(const c10::Storage& storage, bool reader_keeps) {
  if (ids_.contains(storage.unsafeGetStorageImpl())) return;
  const uint64_t size_bytes = AllocationBytes(storage.nbytes());
  ahead_bytes_ -= static_cast<int64_t>(size_bytes);
  const Id id = FindOrAdd(storage);
  if (!reader_keeps) Hold(id, {0, size_bytes});
}

void KnownStorages::Hold(Id id, StorageExtent extent) {
  storages_[id].held.push_back(extent);
  SumHeld(storages_[id]);
}

void KnownStorages::Release(Id id, StorageExtent extent) {
  absl::InlinedVector<StorageExtent, 1>& held = storages_[id].held;
  const auto found = std::find_if(held.begin(), held.end(), [&](const StorageExtent& other) {
    return other.begin_bytes == extent.begin_bytes && other.end_bytes == extent.end_bytes;
  });
  PINION_CHECK(found != held.end()) << "an extent is released that nobody holds";
  held.erase(found);
  SumHeld(storages_[id]);
}

void KnownStorages::SumHeld(Storage& storage) {
  const uint64_t before = storage.held_bytes;
  storage.held_bytes = storage.held.size() == 1
                           ? storage.held.front().size_bytes()
                           : UnionBytes({storage.held.begin(), storage.held.end()});
  if (storage.is_living) held_bytes_ = held_bytes_ - before + storage.held_bytes;
}

}  // namespace pinion
