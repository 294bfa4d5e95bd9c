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
#include <list>
#include <memory>
#include <utility>

#include "pinion/engine/host_buffer.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/hooks/guarded_storage.h"
#include "pinion/hooks/offload_policy.h"
#include "pinion/hooks/saved_version.h"
#include "pinion/hooks/torch_bridge.h"

namespace pinion {

struct StorageRecord : public std::enable_shared_from_this<StorageRecord> {
  enum class CopyOut {
    kPending,     // waits for company, or for the window
    kSubmitting,  // on some thread right now
    kSubmitted,   // `copy_out` is valid
    kNone,        // never: the source stays on the device
  };

  StorageRecord(const c10::Storage& storage, SavedVersion version_at_pack,
                StorageExtent saved_extent, const BoundStream& stream, bool may_be_held,
                uint64_t saved_by)
      : identity(storage.getWeakStorageImpl()),
        version(std::move(version_at_pack)),
        extent(saved_extent),
        data(storage.data()),
        storage_bytes(storage.nbytes()),
        pack_stream(stream),
        maybe_held(may_be_held),
        node(saved_by),
        source(storage) {}

  uint64_t size_bytes() const { return extent.size_bytes(); }

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
  const uint64_t node;    // that saved it first

  // ---- guarded ----
  c10::Storage source;  // empty once evicted
  CopyOut state = CopyOut::kPending;
  Transfer copy_out;
  std::shared_ptr<HostBuffer> host;  // empty when state is kNone

  GuardedStorage fetched;                // the bytes of `extent`, back on the device
  c10::VariableVersion fetched_version;  // of its views: rises when one of them is changed in place
  bool fetching = false;                 // some thread fills `fetched`
  bool fetched_ahead = false;            // and nobody has read it yet
  int64_t fetched_in = -1;               // by which backward

  // Handles that were unpacked since `epoch` began. When all live ones are, `fetched` may go.
  int live_handles = 0;
  int read_handles = 0;
  uint64_t epoch = 1;

  bool in_window = false;                               // counted in the eviction window
  std::list<StorageRecord*>::iterator window_position;  // valid while in_window
  std::list<StorageRecord*>::iterator position;         // in the order of packing
  uint64_t scope = 0;                                   // whose end is the next after the pack
};

}  // namespace pinion

#endif  // PINION_HOOKS_STORAGE_RECORD_H_
