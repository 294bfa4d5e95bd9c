#include "pinion/hooks/activations/saved_storages.h"

#include <algorithm>

namespace pinion {

RecordPtr SavedStorages::Find(const c10::Storage& storage, const SavedVersion& version,
                              const StorageExtent& extent) const {
  const auto found = records_.find(storage.unsafeGetStorageImpl());
  if (found == records_.end()) return nullptr;
  // Newest first: an overlapping record of another version or counter shows that the bytes may have
  // changed.
  for (auto it = found->second.rbegin(); it != found->second.rend(); ++it) {
    StorageRecord& record = **it;
    if (record.extent.end_bytes <= extent.begin_bytes ||
        extent.end_bytes <= record.extent.begin_bytes) {
      continue;
    }
    if (record.version != version || !record.HasItsMemory(storage)) return nullptr;
    if (record.extent.begin_bytes <= extent.begin_bytes &&
        extent.end_bytes <= record.extent.end_bytes) {
      return record.shared_from_this();
    }
  }
  return nullptr;
}

RecordPtrs SavedStorages::All() const {
  RecordPtrs found;
  for (const auto& [storage, records] : records_) {
    for (StorageRecord* record : records) found.push_back(record->shared_from_this());
  }
  std::sort(found.begin(), found.end(),
            [](const RecordPtr& a, const RecordPtr& b) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
              return a->in_schedule.sequence < b->in_schedule.sequence;
            });
  return found;
}

void SavedStorages::NoteStays(StorageRecord& record) {
  record.leaving.Stay();
  staying_[record.in_schedule.object] = &record;
}

RecordPtr SavedStorages::TakeStaying(uint32_t object) {
  const auto found = staying_.find(object);
  if (found == staying_.end()) return nullptr;
  StorageRecord& record = *found->second;
  staying_.erase(found);
  return record.shared_from_this();
}

void SavedStorages::Add(StorageRecord& record) {
  auto& records = records_[record.storage()];
  record.leaving.set_pending_bytes(records.empty() ? record.storage_bytes : record.size_bytes());
  records.push_back(&record);
}

void SavedStorages::Remove(const StorageRecord& record) {
  const auto found = records_.find(record.storage());
  auto& records = found->second;
  records.erase(std::find(records.begin(), records.end(), &record));
  if (records.empty()) records_.erase(found);
  if (record.Stays()) staying_.erase(record.in_schedule.object);
}

}  // namespace pinion
