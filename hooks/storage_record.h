// One saved storage (or a part of one), at one version: what DeviceOffloader knows about it.
//
// A record is shared by the handles of all saved tensors that are views of the same bytes. Fields
// below the line are guarded by the owning DeviceOffloader's mutex. Clang cannot check that: an
// annotation would need an expression for that mutex, and a record does not know its owner.

#ifndef PINION_HOOKS_STORAGE_RECORD_H_
#define PINION_HOOKS_STORAGE_RECORD_H_

#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "pinion/hooks/offload_policy.h"
#include "pinion/hooks/parcel.h"
#include "pinion/hooks/saved_tensor_hooks.h"
#include "pinion/hooks/saved_version.h"
#include "pinion/hooks/tensor_checksum.h"
#include "pinion/hooks/torch_bridge.h"

namespace pinion {

struct StorageRecord : public std::enable_shared_from_this<StorageRecord> {
  enum class CopyOut {
    kInUse,    // an operator that saved it may still run, and write it
    kPending,  // waits for company
    kDecided,  // it was submitted or soon will be, or the source stays on the device
  };

  StorageRecord(const c10::Storage& storage, SavedVersion version_at_pack,
                StorageExtent saved_extent, const BoundStream& stream, bool may_be_held,
                ScopeId saved_in)
      : identity(storage.getWeakStorageImpl()),
        version(std::move(version_at_pack)),
        extent(saved_extent),
        data(storage.data()),
        storage_bytes(storage.nbytes()),
        pack_stream(stream),
        maybe_held(may_be_held),
        scope(saved_in),
        source(storage) {}

  uint64_t size_bytes() const { return extent.size_bytes(); }

  // Its copy has not begun, and it has a place in its scope. Guarded.
  bool IsAwaited() const { return state == CopyOut::kInUse || state == CopyOut::kPending; }

  // From a place in the storage to the same byte in the parcel.
  int64_t ShiftIntoParcel() const {
    return static_cast<int64_t>(parcel_offset) - static_cast<int64_t>(extent.begin_bytes);
  }

  // False once someone has resized `storage`, the one that was saved, or given it other memory:
  // that raises no version.
  bool HasItsMemory(const c10::Storage& storage) const {
    return storage.data() == data && storage.nbytes() == storage_bytes;
  }

  // The weak reference keeps the StorageImpl's address from being recycled.
  const WeakStorage identity;
  const SavedVersion version;
  const StorageExtent extent;  // the bytes of the storage that are saved
  const void* const data;      // of all of the storage
  const uint64_t storage_bytes;
  const BoundStream pack_stream;
  const bool maybe_held;  // stays on the device if someone holds it once its operator has returned
  const ScopeId scope;    // in which it was saved first

  // Of `extent`'s bytes when they leave; only in verify mode. Written before the parcel is
  // published, read by those who have found the parcel.
  TensorChecksum checksum;

  // ---- guarded ----
  c10::Storage source;  // empty once evicted or gathered
  CopyOut state = CopyOut::kInUse;
  absl::InlinedVector<NodeId, 1> nodes;  // of the operators that may still run, while kInUse
  std::shared_ptr<Parcel> parcel;        // once the copy is submitted
  uint64_t parcel_offset = 0;            // at which `extent` begins in it

  int live_handles = 0;
  uint64_t sequence = 0;  // in the order of packing
  // Of the device, that its copy out lets go of: all of the storage for the first record of it.
  uint64_t pending_bytes = 0;
};

}  // namespace pinion

#endif  // PINION_HOOKS_STORAGE_RECORD_H_
