// DeviceOffloader's record of a saved storage, or of a part of one, at one version.
//
// The handles of all saved tensors that are views of the same bytes share a record. Records know
// tensors, parcels (engine/tier/parcel.h) know copies. A large tensor has its own parcel; small
// ones share one. A record owns its memory until the copy out is submitted (LeavingMemory), and
// then has a place in a parcel (ParcelPart in a SavedParcel).

#ifndef PINION_HOOKS_ACTIVATIONS_STORAGE_RECORD_H_
#define PINION_HOOKS_ACTIVATIONS_STORAGE_RECORD_H_

#include <c10/core/Storage.h>

#include <algorithm>
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
#include "pinion/hooks/activations/saved_origin.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/saved_version.h"
#include "pinion/hooks/autograd/tensor_checksum.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/plan/device_recording.h"
#include "pinion/hooks/plan/offload_policy.h"
#include "pinion/hooks/plan/parameter_cast.h"

namespace pinion {

struct StorageRecord;

// Stands for the OffloadState lock that guards records, which the records do not know. OffloadLock
// (offload_state.h) takes both, so clang checks that code which touches a record holds such a lock,
// though not that it is the lock of the record's device.
struct ABSL_LOCKABLE RecordsLock {};
inline constexpr RecordsLock kRecordsLock;

// A parcel of saved tensors.
struct SavedParcel final : public Parcel, public ScheduledParcel {
  SavedParcel(uint64_t parcel_bytes, StreamHandle native, std::shared_ptr<ParcelPlace> place,
              const BoundStream& saved_on)
      : Parcel(parcel_bytes, native, std::move(place)), pack_stream(saved_on) {
    ScheduledParcel::size_bytes = parcel_bytes;
    ScheduledParcel::stream = static_cast<uint64_t>(saved_on.torch.id());
  }

  using Parcel::size_bytes;
  const BoundStream pack_stream;  // the gather and the copy out follow its work
  // Reads in the backward during which the parcel was offloaded are not counted: earlier reads were
  // not tracked, and a later backward may read again.
  const int64_t left_in_backward = CurrentBackward();
  // True: the copy out reads one device block into which the tensors were gathered. False: it reads
  // their storages, each a piece of its own. Written before the parcel is published.
  bool gathered = false;

  absl::InlinedVector<StorageRecord*, 1> records
      ABSL_GUARDED_BY(kRecordsLock);  // with live handles
};

// A record's place in a parcel; empty until the copy out is submitted.
class ParcelPart {
 public:
  ParcelPart() = default;
  // `piece` is the record's index among the pieces of a parcel that is not gathered.
  ParcelPart(std::shared_ptr<SavedParcel> parcel, size_t piece, uint64_t offset_bytes)
      : parcel_(std::move(parcel)), piece_(piece), offset_bytes_(offset_bytes) {}

  const std::shared_ptr<SavedParcel>& parcel() const { return parcel_; }
  uint64_t offset_bytes() const { return offset_bytes_; }

  // Returns whether the parcel owns the original memory.
  bool HoldsMemory() const {
    return parcel_ != nullptr && !parcel_->gathered && parcel_->Holds(piece_);
  }
  GuardedMemory TakeHeld() const { return parcel_->TakeHeld(piece_); }
  // Returns whether the parcel has the bytes on the device in other memory than the original.
  bool IsOnDevice() const {
    return parcel_ != nullptr && parcel_->state() != Parcel::State::kAway &&
           (parcel_->gathered || parcel_->state() != Parcel::State::kHeld);
  }

 private:
  std::shared_ptr<SavedParcel> parcel_;
  size_t piece_ = 0;
  uint64_t offset_bytes_ = 0;
};

// The device memory of a saved tensor until its copy out is submitted: whether the copy may begin,
// and for which operators it waits. Owns a reference to the storage until TakeSource.
//
//   leaving.Await(node);                                        // its operator may still write it
//   if (leaving.ForgetReturned(now)) leaving.WaitForBatch();  // at the thread's node `now`
//   leaving.Decide();                                           // its copy out is about to begin
class LeavingMemory {
 public:
  explicit LeavingMemory(const c10::Storage& source) : source_(source) {}

  // Returns null once the copy out is submitted (the parcel then owns the memory), or once the
  // tensor was dropped to be recast.
  const c10::Storage& source() const { return source_; }
  c10::Storage TakeSource() { return std::exchange(source_, c10::Storage()); }
  // Device bytes that the copy out makes free: the whole storage for its first record.
  uint64_t pending_bytes() const { return pending_bytes_; }
  void set_pending_bytes(uint64_t pending_bytes) { pending_bytes_ = pending_bytes; }

  // --- state of the copy out ---

  bool IsInUse() const { return copy_out_ == CopyOut::kInUse; }
  bool IsPending() const { return copy_out_ == CopyOut::kPending; }
  // Returns whether the copy has not begun and the record waits for it in its scope.
  bool IsAwaited() const { return IsInUse() || IsPending(); }
  // Returns whether the schedule keeps the record resident at present.
  bool Stays() const { return copy_out_ == CopyOut::kStays; }

  void Await(const NodeId& saver) {
    copy_out_ = CopyOut::kInUse;
    savers_.push_back(saver);
  }
  void WaitForBatch() { copy_out_ = CopyOut::kPending; }
  // Makes the record stay if the program references it after its operator: a copy frees nothing.
  void StayIfHeld() { stays_if_held_ = true; }
  bool IsKeptByHolder() const { return stays_if_held_ && source_.use_count() > 1; }
  void Stay() { copy_out_ = CopyOut::kStays; }
  // The copy out is submitted or soon will be, or there is none: the memory stays on the device or
  // is released.
  void Decide() { copy_out_ = CopyOut::kDecided; }

  // --- operators that have saved it ---

  // Adds an operator that has saved the record, in the record's scope or `elsewhere`.
  void NoteSaver(const NodeId& saver, bool elsewhere) {
    savers_.push_back(saver);
    saved_elsewhere_ = saved_elsewhere_ || elsewhere;
  }
  NodeId TakeLastSaver() {
    const NodeId saver = savers_.back();
    savers_.pop_back();
    return saver;
  }
  bool saved_elsewhere() const { return saved_elsewhere_; }
  bool IsSavedBy(const NodeId& node) const {
    return std::any_of(savers_.begin(), savers_.end(), [&](const NodeId& saver) {
      return saver.thread == node.thread && saver.sequence == node.sequence;
    });
  }
  // Returns whether all these operators have returned when `node` has begun.
  bool HaveSaversReturned(const NodeId& node) const {
    return std::all_of(savers_.begin(), savers_.end(),
                       [&](const NodeId& saver) { return HasReturned(saver, node); });
  }
  // The same, but forgets the operators that have returned.
  bool ForgetReturned(const NodeId& node) {
    savers_.erase(std::remove_if(savers_.begin(), savers_.end(),
                                 [&](const NodeId& saver) { return HasReturned(saver, node); }),
                  savers_.end());
    return savers_.empty();
  }

 private:
  enum class CopyOut { kInUse, kPending, kStays, kDecided };

  c10::Storage source_;
  CopyOut copy_out_ = CopyOut::kInUse;
  // While kInUse, operators that may still run; while kStays, all operators.
  absl::InlinedVector<NodeId, 1> savers_;
  bool saved_elsewhere_ = false;
  bool stays_if_held_ = false;
  uint64_t pending_bytes_ = 0;
};

// The latest recast, which later readers share while it lives.
struct LastCast {
  WeakStorage storage;
  BoundStream stream;  // the stream that computed it
};

struct StorageRecord : public std::enable_shared_from_this<StorageRecord> {
  struct InSchedule {
    uint64_t sequence = 0;  // order of the records' last saves in their scopes
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
  // Adds an operator that has saved the resident record.
  void NoteSaver(const NodeId& node, ScopeId in) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    leaving.NoteSaver(node, /*elsewhere=*/in != scope);
  }

  SavedPlace place() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    return {scope, in_schedule.sequence};
  }

  // Returns whether the memory stays until the last handle is gone, as without offload. False for
  // a record that Stays(): it may be offloaded later.
  bool IsNeverOffloaded() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    return leaving.source() && !leaving.IsAwaited() && !leaving.Stays();
  }

  // Returns whether the record or its parcel owns the original storage.
  bool HoldsMemory() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    return leaving.source() || in_parcel.HoldsMemory();
  }

  // Returns whether the bytes are available without a copy or a recast.
  bool IsOnDevice() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    return !identity.expired() || in_parcel.IsOnDevice() ||
           (last_cast.has_value() && !last_cast->storage.expired());
  }

  // Returns whether neither the record nor a parcel owns the bytes: readers recast the parameter.
  bool IsCastAgain() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    return cast != nullptr && in_parcel.parcel() == nullptr && !leaving.source();
  }
  // Returns whether the next reader must recast, because the bytes are nowhere on the device.
  bool HasToBeCast() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    return IsCastAgain() && !IsOnDevice();
  }
  // Drops the record to be recast. Returns the source for the caller to release.
  c10::Storage LeaveToBeCastAgain() ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    leaving.Decide();
    return leaving.TakeSource();
  }

  // Returns the shift from an offset in the storage to the same byte in the parcel.
  int64_t ShiftIntoParcel() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
    return static_cast<int64_t>(in_parcel.offset_bytes()) -
           static_cast<int64_t>(extent.begin_bytes);
  }

  // Returns false if the saved `storage` was resized or got other memory, which raises no version.
  bool HasItsMemory(const c10::Storage& storage) const {
    return storage.data() == data && storage.nbytes() == storage_bytes;
  }

  // The weak reference keeps the StorageImpl's address from being recycled.
  const WeakStorage identity;
  const SavedVersion version;
  const StorageExtent extent;  // the saved bytes of the storage
  const void* const data;      // the storage's first byte
  const uint64_t storage_bytes;
  const BoundStream pack_stream;
  const ScopeId scope;                              // the first scope that saved it
  const std::unique_ptr<const ParameterCast> cast;  // computes these bytes; may be null

  const SavedOrigin origin;
  NotedAs noted;  // while a step is recorded

  // Checksum of `extent` when it is offloaded, in verify mode only. Written before the parcel is
  // published, or for a cast before the record is found.
  TensorChecksum checksum;

  LeavingMemory leaving ABSL_GUARDED_BY(kRecordsLock);
  ParcelPart in_parcel ABSL_GUARDED_BY(kRecordsLock);
  InSchedule in_schedule ABSL_GUARDED_BY(kRecordsLock);
  std::optional<LastCast> last_cast ABSL_GUARDED_BY(kRecordsLock);
  int live_handles ABSL_GUARDED_BY(kRecordsLock) = 0;
};

using RecordPtr = std::shared_ptr<StorageRecord>;
// Usually one large tensor.
using RecordPtrs = absl::InlinedVector<RecordPtr, 1>;

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_STORAGE_RECORD_H_
