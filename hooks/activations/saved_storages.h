// Which storages have records, and which record a tensor can share.
//
// Thread safety: none; whoever calls holds the lock of the OffloadState that it belongs to.

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
  // A record of the same bytes, at the same version, of which a tensor with `extent` can be a view;
  // null: none.
  RecordPtr Find(const c10::Storage& storage, const SavedVersion& version,
                 const StorageExtent& extent) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);

  // A record is here while it has live handles. Sets its pending_bytes.
  void Add(StorageRecord& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);
  void Remove(const StorageRecord& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);
  // A record that is here is to stay on the device, as one of the schedule's objects. TakeStaying
  // finds it by that, once; null: it is gone, or was taken.
  void NoteStays(StorageRecord& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);
  RecordPtr TakeStaying(uint32_t object) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);
  // All, in the order of packing.
  RecordPtrs All() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);
  bool Contains(const c10::StorageImpl* storage) const { return records_.contains(storage); }

 private:
  absl::flat_hash_map<const c10::StorageImpl*, absl::InlinedVector<StorageRecord*, 1>> records_;
  absl::flat_hash_map<uint32_t, StorageRecord*> staying_;  // by the schedule's object
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_SAVED_STORAGES_H_
