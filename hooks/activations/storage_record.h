// One saved storage (or a part of one), at one version: what DeviceOffloader knows about it.
//
// A record is shared by the handles of all saved tensors that are views of the same bytes. All that
// is about tensors is said of records, all that is about copies of parcels (engine/tier/parcel.h):
// a large tensor is a parcel of its own, small ones share one.

#ifndef PINION_HOOKS_ACTIVATIONS_STORAGE_RECORD_H_
#define PINION_HOOKS_ACTIVATIONS_STORAGE_RECORD_H_

#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "pinion/engine/plan/offload_schedule.h"
#include "pinion/engine/tier/parcel.h"
#include "pinion/hooks/activations/saved_origin.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/saved_version.h"
#include "pinion/hooks/autograd/tensor_checksum.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/plan/offload_policy.h"
#include "pinion/hooks/plan/parameter_cast.h"

namespace pinion {

struct StorageRecord;

// What guards records and the tables of them: the lock of the OffloadState that they belong to,
// which none of them knows. OffloadLock (offload_state.h) takes both, so clang checks that whoever
// touches a record holds such a lock. That it is the lock of the record's own device it cannot see.
struct ABSL_LOCKABLE RecordsLock {};
inline constexpr RecordsLock kRecordsLock;

// Saved tensors that travel together.
struct SavedParcel final : public Parcel, public ScheduledParcel {
  SavedParcel(uint64_t parcel_bytes, StreamHandle native, std::shared_ptr<ParcelPlace> place,
              const BoundStream& saved_on)
      : Parcel(parcel_bytes, native, std::move(place)), pack_stream(saved_on) {
    ScheduledParcel::size_bytes = parcel_bytes;
    ScheduledParcel::stream = static_cast<uint64_t>(saved_on.torch.id());
  }

  using Parcel::size_bytes;
  const BoundStream pack_stream;  // the copy out, and a gather before it, come after its work
  // Nobody counts as having read what is found on the device in this one: who has done so before
  // the parcel left is not known, and all of them may read anew in the next.
  const int64_t left_in_backward = CurrentBackward();
  // The copy out reads one block of device memory with the parcel's own layout, in which the
  // tensors were gathered. Otherwise it reads their storages, each a piece of its own. Written
  // before the parcel is published.
  bool gathered = false;

  absl::InlinedVector<StorageRecord*, 1> records
      ABSL_GUARDED_BY(kRecordsLock);  // with live handles
};

// What was last made by casting a parameter again, for others who read it while it lives.
struct LastCast {
  WeakStorage storage;
  BoundStream stream;  // that made it
};

struct StorageRecord : public std::enable_shared_from_this<StorageRecord> {
  enum class CopyOut {
    kInUse,    // an operator that saved it may still run, and write it
    kPending,  // waits for company
    kStays,    // the schedule keeps it on the device, as things stand
    kDecided,  // it was submitted or soon will be, or there is none: the source stays on the
               // device, or was let go of (IsCastAgain)
  };

  // While the device memory that was saved is the record's.
  struct Leaving {
    c10::Storage source;  // until the copy out is submitted; from then on the parcel holds it
    CopyOut copy_out = CopyOut::kInUse;
    // Of the operators that may still run, while kInUse; that have saved it, while kStays.
    absl::InlinedVector<NodeId, 1> nodes;
    bool saved_elsewhere = false;  // one of these has saved it in another scope, while kStays
    // Of the device, that its copy out lets go of: all of the storage for the first record of it.
    uint64_t pending_bytes = 0;
  };

  // Once the copy out is submitted.
  struct InParcel {
    std::shared_ptr<SavedParcel> parcel;  // null before
    size_t piece = 0;                     // of the parcel, unless that was gathered
    uint64_t offset_bytes = 0;            // at which `extent` begins in it
  };

  struct InSchedule {
    uint64_t sequence = 0;  // in the order in which records were saved last, in their scopes
    uint32_t object = 0;    // the schedule's number
  };

  StorageRecord(const c10::Storage& storage, SavedVersion version_at_pack,
                StorageExtent saved_extent, const BoundStream& stream, bool may_be_held,
                ScopeId saved_in, std::unique_ptr<const ParameterCast> can_be_cast,
                const at::Tensor& tensor, const NodeId& saver)
      : identity(storage.getWeakStorageImpl()),
        version(std::move(version_at_pack)),
        extent(saved_extent),
        data(storage.data()),
        storage_bytes(storage.nbytes()),
        pack_stream(stream),
        maybe_held(may_be_held),
        scope(saved_in),
        cast(std::move(can_be_cast)),
        origin(tensor, saver),
        leaving{.source = storage, .nodes = {}} {}

  uint64_t size_bytes() const { return extent.size_bytes(); }
  const c10::StorageImpl* storage() const { return identity._unsafe_get_target(); }

  // Its copy has not begun, and it has a place in its scope.
  bool IsAwaited() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    return leaving.copy_out == CopyOut::kInUse || leaving.copy_out == CopyOut::kPending;
  }

  SavedPlace place() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    return {scope, in_schedule.sequence};
  }
  bool Stays() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    return leaving.copy_out == CopyOut::kStays;
  }

  // An operator saves it, and it stays.
  void NoteSaver(const NodeId& node, ScopeId in) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    leaving.nodes.push_back(node);
    leaving.saved_elsewhere = leaving.saved_elsewhere || in != scope;
  }

  // Of the storage that was saved.
  bool HoldsMemory() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    const auto& [parcel, piece, offset_bytes] = in_parcel;
    return leaving.source || (parcel != nullptr && !parcel->gathered && parcel->Holds(piece));
  }

  // The bytes can be had without a copy or a cast.
  bool IsOnDevice() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    const std::shared_ptr<SavedParcel>& parcel = in_parcel.parcel;
    return !identity.expired() ||
           (parcel != nullptr && parcel->state() != Parcel::State::kAway &&
            (parcel->gathered || parcel->state() != Parcel::State::kHeld)) ||
           (last_cast.has_value() && !last_cast->storage.expired());
  }

  // Nobody here holds the bytes, and no copy of them: whoever needs them casts the parameter again.
  bool IsCastAgain() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    return cast != nullptr && in_parcel.parcel == nullptr && !leaving.source;
  }
  // And nobody else has them, either.
  bool HasToBeCast() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    return IsCastAgain() && identity.expired() &&
           (!last_cast.has_value() || last_cast->storage.expired());
  }
  // It is cast again from now on. Returns the source, to be let go of.
  c10::Storage LeaveToBeCastAgain() ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    leaving.copy_out = CopyOut::kDecided;
    return std::exchange(leaving.source, c10::Storage());
  }

  // From a place in the storage to the same byte in the parcel.
  int64_t ShiftIntoParcel() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    return static_cast<int64_t>(in_parcel.offset_bytes) - static_cast<int64_t>(extent.begin_bytes);
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
  const std::unique_ptr<const ParameterCast> cast;  // that makes these bytes; null: none does

  const SavedOrigin origin;

  // Of `extent`'s bytes when they leave; only in verify mode. Written before the parcel is
  // published, read by those who have found the parcel; of a cast, before the record is found.
  TensorChecksum checksum;

  Leaving leaving ABSL_GUARDED_BY(kRecordsLock);
  InParcel in_parcel ABSL_GUARDED_BY(kRecordsLock);
  InSchedule in_schedule ABSL_GUARDED_BY(kRecordsLock);
  std::optional<LastCast> last_cast ABSL_GUARDED_BY(kRecordsLock);
  int live_handles ABSL_GUARDED_BY(kRecordsLock) = 0;
};

using RecordPtr = std::shared_ptr<StorageRecord>;
// Large tensors leave one by one.
using RecordPtrs = absl::InlinedVector<RecordPtr, 1>;

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_STORAGE_RECORD_H_
