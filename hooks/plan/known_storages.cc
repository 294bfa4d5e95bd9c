#include "pinion/hooks/plan/known_storages.h"

#include <c10/core/Allocator.h>

#include <utility>

#include "pinion/allocator/base/check.h"
#include "pinion/device/allocation_bytes.h"

namespace pinion {

KnownStorages::Bytes KnownStorages::CountAt(int64_t allocated_bytes) {
  std::erase_if(living_, [this](Id id) { return CountOutIfGone(id); });
  return {allocated_bytes, static_cast<int64_t>(living_bytes_)};
}

KnownStorages::Bytes KnownStorages::CountAfter(int64_t allocated_bytes,
                                               absl::Span<const void* const> freed) {
  for (const void* data : freed) {
    const auto found = by_data_.find(data);
    if (found == by_data_.end()) continue;
    if (!CountOutIfGone(found->second)) untold_.push_back(found->second);  // memory was replaced
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
  if (storage.holds > 0) held_bytes_ -= storage.size_bytes;
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
  // The storage known at this address was destroyed or has other memory.
  if (!is_only) untold_.push_back(std::exchange(found->second, id));
}

bool KnownStorages::NoteRead(const c10::Storage& storage, bool reader_keeps) {
  if (ids_.contains(storage.unsafeGetStorageImpl())) return false;
  const uint64_t size_bytes = AllocationBytes(storage.nbytes());
  ahead_bytes_ -= static_cast<int64_t>(size_bytes);
  const Id id = FindOrAdd(storage);
  if (!reader_keeps) Hold(id);
  return true;
}

void KnownStorages::Hold(Id id) {
  Storage& storage = storages_[id];
  if (++storage.holds == 1 && storage.is_living) held_bytes_ += storage.size_bytes;
}

void KnownStorages::Release(Id id) {
  Storage& storage = storages_[id];
  PINION_CHECK(storage.holds > 0) << "a storage is released that nobody holds";
  if (--storage.holds == 0 && storage.is_living) held_bytes_ -= storage.size_bytes;
}

}  // namespace pinion
