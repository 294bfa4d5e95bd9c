// Which storages have records, and which record a tensor can share.
//
// Thread safety: none; whoever calls holds the lock of the OffloadState that it belongs to.

#ifndef PINION_HOOKS_ACTIVATIONS_SAVED_STORAGES_H_
#define PINION_HOOKS_ACTIVATIONS_SAVED_STORAGES_H_

#include <c10/core/Storage.h>

#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
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
  // Those of the schedule's objects that have records, in the order of packing.
  RecordPtrs Find(const std::vector<uint32_t>& objects) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);
  // All, in the same order.
  RecordPtrs All() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);
  bool Contains(const c10::StorageImpl* storage) const { return records_.contains(storage); }

 private:
  RecordPtrs Select(absl::FunctionRef<bool(const StorageRecord&)> is_wanted) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);

  absl::flat_hash_map<const c10::StorageImpl*, absl::InlinedVector<StorageRecord*, 1>> records_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_SAVED_STORAGES_H_
