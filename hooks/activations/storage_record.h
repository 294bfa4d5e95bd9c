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
#include "pinion/engine/schedule/offload_schedule.h"
#include "pinion/engine/tier/guarded_memory.h"
#include "pinion/engine/tier/parcel.h"
#include "pinion/hooks/activations/leaving_memory.h"
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

// Where in a parcel the bytes of a record are, once their copy out is submitted; none before.
class ParcelPart {
 public:
  ParcelPart() = default;
  // They begin `offset_bytes` behind the parcel's. Unless that was gathered, they are its `piece`.
  ParcelPart(std::shared_ptr<SavedParcel> parcel, size_t piece, uint64_t offset_bytes)
      : parcel_(std::move(parcel)), piece_(piece), offset_bytes_(offset_bytes) {}

  const std::shared_ptr<SavedParcel>& parcel() const { return parcel_; }
  uint64_t offset_bytes() const { return offset_bytes_; }

  // The parcel has the memory that was saved.
  bool HoldsMemory() const {
    return parcel_ != nullptr && !parcel_->gathered && parcel_->Holds(piece_);
  }
  GuardedMemory TakeHeld() const { return parcel_->TakeHeld(piece_); }
  // The parcel has the bytes on the device, in other memory than that which was saved.
  bool IsOnDevice() const {
    return parcel_ != nullptr && parcel_->state() != Parcel::State::kAway &&
           (parcel_->gathered || parcel_->state() != Parcel::State::kHeld);
  }

 private:
  std::shared_ptr<SavedParcel> parcel_;
  size_t piece_ = 0;
  uint64_t offset_bytes_ = 0;
};

// What was last made by casting a parameter again, for others who read it while it lives.
struct LastCast {
  WeakStorage storage;
  BoundStream stream;  // that made it
};

struct StorageRecord : public std::enable_shared_from_this<StorageRecord> {
  struct InSchedule {
    uint64_t sequence = 0;  // in the order in which records were saved last, in their scopes
    uint32_t object = 0;    // the schedule's number
  };

  StorageRecord(const c10::Storage& storage, SavedVersion version_at_pack,
                StorageExtent saved_extent, const BoundStream& stream, ScopeId saved_in,
                std::unique_ptr<const ParameterCast> can_be_cast, const at::Tensor& tensor,
                const NodeId& saver)
      : identity(storage.getWeakStorageImpl()),
        version(std::move(version_at_pack)),
        extent(saved_extent),
        data(storage.data()),
        storage_bytes(storage.nbytes()),
        pack_stream(stream),
        scope(saved_in),
        cast(std::move(can_be_cast)),
        origin(tensor, saver),
        leaving(storage) {}

  uint64_t size_bytes() const { return extent.size_bytes(); }
  const c10::StorageImpl* storage() const { return identity._unsafe_get_target(); }

  bool IsAwaited() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) { return leaving.IsAwaited(); }
  bool Stays() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) { return leaving.Stays(); }
  // An operator saves it, and it stays.
  void NoteSaver(const NodeId& node, ScopeId in) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    leaving.NoteSaver(node, /*elsewhere=*/in != scope);
  }

  SavedPlace place() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    return {scope, in_schedule.sequence};
  }

  // The memory stays until the last handle is gone, as without offload.
  bool IsKept() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    return leaving.source() && !leaving.IsAwaited() && !leaving.Stays();
  }

  // Of the storage that was saved.
  bool HoldsMemory() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    return leaving.source() || in_parcel.HoldsMemory();
  }

  // The bytes can be had without a copy or a cast.
  bool IsOnDevice() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    return !identity.expired() || in_parcel.IsOnDevice() ||
           (last_cast.has_value() && !last_cast->storage.expired());
  }

  // Nobody here holds the bytes, and no copy of them: whoever needs them casts the parameter again.
  bool IsCastAgain() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    return cast != nullptr && in_parcel.parcel() == nullptr && !leaving.source();
  }
  // And nobody else has them, either.
  bool HasToBeCast() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    return IsCastAgain() && identity.expired() &&
           (!last_cast.has_value() || last_cast->storage.expired());
  }
  // It is cast again from now on. Returns the source, to be let go of.
  c10::Storage LeaveToBeCastAgain() ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    leaving.Decide();
    return leaving.TakeSource();
  }

  // From a place in the storage to the same byte in the parcel.
  int64_t ShiftIntoParcel() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    return static_cast<int64_t>(in_parcel.offset_bytes()) -
           static_cast<int64_t>(extent.begin_bytes);
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
  const ScopeId scope;                              // in which it was saved first
  const std::unique_ptr<const ParameterCast> cast;  // that makes these bytes; null: none does

  const SavedOrigin origin;

  // Of `extent`'s bytes when they leave; only in verify mode. Written before the parcel is
  // published, read by those who have found the parcel; of a cast, before the record is found.
  TensorChecksum checksum;

  LeavingMemory leaving ABSL_GUARDED_BY(kRecordsLock);
  ParcelPart in_parcel ABSL_GUARDED_BY(kRecordsLock);
  InSchedule in_schedule ABSL_GUARDED_BY(kRecordsLock);
  std::optional<LastCast> last_cast ABSL_GUARDED_BY(kRecordsLock);
  int live_handles ABSL_GUARDED_BY(kRecordsLock) = 0;
};

using RecordPtr = std::shared_ptr<StorageRecord>;
// Large tensors leave one by one.
using RecordPtrs = absl::InlinedVector<RecordPtr, 1>;

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_STORAGE_RECORD_H_
