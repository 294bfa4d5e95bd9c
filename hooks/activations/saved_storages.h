// Finds the record whose bytes a newly saved tensor can share.
//
// Thread safety: the owner's OffloadState lock guards it.

#ifndef PINION_HOOKS_ACTIVATIONS_SAVED_STORAGES_H_
#define PINION_HOOKS_ACTIVATIONS_SAVED_STORAGES_H_

#include <c10/core/Storage.h>

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "pinion/hooks/activations/storage_record.h"
#include "pinion/hooks/autograd/saved_version.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {

class SavedStorages {
 public:
  // Returns a record of the storage at that version whose bytes contain `extent`; null if none.
  RecordPtr Find(const c10::Storage& storage, const SavedVersion& version,
                 const StorageExtent& extent) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);

  // Add sets the record's pending_bytes. Remove it when its last handle is gone.
  void Add(StorageRecord& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);
  void Remove(const StorageRecord& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);
  // Marks an added record as resident. TakeStaying finds it once by the schedule's object number,
  // and returns null if it was removed or taken.
  void NoteStays(StorageRecord& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);
  RecordPtr TakeStaying(uint32_t object) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);
  // Returns all records in the order of their last save.
  RecordPtrs All() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);
  bool Contains(const c10::StorageImpl* storage) const { return records_.contains(storage); }

 private:
  absl::flat_hash_map<const c10::StorageImpl*, absl::InlinedVector<StorageRecord*, 1>> records_;
  absl::flat_hash_map<uint32_t, StorageRecord*> staying_;  // by the schedule's object
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_SAVED_STORAGES_H_
