// The saved tensors of one device: the rules of the data path have their home here.
//
//   pack     a copy out to a block of host memory, after the pack stream's present work; a handle
//   evict    once a window of bytes has passed, the pack stream waits for the copy (an event, never
//            the host) and the device storage is dropped
//   unpack   storage alive? use it. fetched? the current stream waits for it. else fetch now
//   prefetch the parcels that were packed before this one in the same scope, newest first, within a
//            window of bytes
//
// Nothing reads a saved tensor before the operator that saved it has returned (HasReturned): no
// copy, no gather, no checksum, no judgement on who holds it. That is known at the thread's next
// node, or at the end of the scope. Tensors below 1 MiB then wait until there is that much of them,
// a quarter of the window has passed, or the scope ends, and leave as one batch. Small ones, by the
// calibration of the link, wait for each other in the same way and share a parcel.
//
// Thread safety: thread-safe. No device, allocator or LibTorch call is made with mu_ held.
// Ownership: handles share ownership, so a graph may outlive the session.

#ifndef PINION_HOOKS_DEVICE_OFFLOADER_H_
#define PINION_HOOKS_DEVICE_OFFLOADER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/device/trace_sink.h"
#include "pinion/engine/link_calibration.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/hooks/guarded_storage.h"
#include "pinion/hooks/offload_options.h"
#include "pinion/hooks/offload_stats.h"
#include "pinion/hooks/parcel.h"
#include "pinion/hooks/saved_tensor_hooks.h"
#include "pinion/hooks/saved_version.h"
#include "pinion/hooks/storage_record.h"
#include "pinion/hooks/torch_bridge.h"

namespace pinion {

class DeviceOffloader : public std::enable_shared_from_this<DeviceOffloader> {
 public:
  DeviceOffloader(const OffloadOptions& options, c10::Device device, const LinkCalibration& link,
                  std::shared_ptr<TransferEngine> engine,
                  std::shared_ptr<PinnedAllocator> allocator,
                  std::shared_ptr<OffloadStatsRecorder> stats);

  // Null when the tensor has to stay on the device; the reason has been counted.
  // One that is `maybe_held` stays if someone still holds it once its operator has returned.
  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, bool maybe_held, ScopeId scope);

  // No operator of the scope runs any more: what is pending of it goes, and the windows learn what
  // it saved.
  void EndScope(ScopeId scope);

  TransferEngine& engine() const { return *engine_; }
  const LinkCalibration& link() const { return link_; }

 private:
  class Handle;
  using RecordPtr = std::shared_ptr<StorageRecord>;
  using ParcelPtr = std::shared_ptr<Parcel>;

  // Things to let go of once mu_ is released.
  struct Released {
    std::vector<GuardedStorage> storages;
    std::vector<c10::Storage> gathered;  // no copy touches them
  };

  // What was saved in a scope.
  struct ScopeBytes {
    uint64_t total = 0;
    uint64_t largest = 0;  // of one tensor
  };

  struct OpenScope {
    ScopeBytes saved;
    std::vector<RecordPtr> running;  // their operators have not returned, as far as is known
    std::vector<RecordPtr> large;    // these wait for company
    std::vector<RecordPtr> small;
    uint64_t large_bytes = 0;
    uint64_t small_bytes = 0;
  };

  // What backward reads.
  struct Bytes {
    c10::Storage storage;
    int64_t shift_bytes = 0;  // from a place in the original storage to the same byte here
  };

  // What leaves together: a parcel in the making.
  struct Leaving;

  at::Tensor Unpack(Handle& handle);
  void Release(Handle& handle);
  void Forget(StorageRecord& record, Released& released) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // --- out ---
  RecordPtr FindShared(const c10::Storage& storage, const SavedVersion& version,
                       const StorageExtent& extent, uint64_t item_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool IsSmall(const StorageRecord& record) const {
    return record.size_bytes() <= largest_small_bytes_;
  }
  // From `running` to those who wait for company.
  void EndOperator(OpenScope& scope, RecordPtr record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void RemovePending(const StorageRecord& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Those who need not wait for company any longer: large ones do not wait for small ones, and
  // nobody waits once the scope ends.
  std::vector<RecordPtr> TakeDue(OpenScope& scope, bool ends) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Leaves that somebody holds stay; the others leave.
  void CopyOut(std::vector<RecordPtr> due);
  // Records of one pack stream.
  void SubmitCopyOut(const std::vector<RecordPtr>& records);
  std::vector<Leaving> PlanParcels(const std::vector<RecordPtr>& records);
  c10::Storage Gather(const Leaving& leaving);
  void TakeChecksums(const Leaving& leaving);
  void Publish(Leaving& leaving, const Transfer& copy, Released& released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CopyOutBlocking(const RecordPtr& record);
  void EvictOverWindow();
  GuardedStorage Evict(Parcel& parcel) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Their copies will not be made: the device keeps the bytes. They count as kept for `reason`.
  void KeepOnDevice(const std::vector<RecordPtr>& records, uint64_t OffloadStats::*reason)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EnterWindow(Parcel& parcel) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void LeaveWindow(Parcel& parcel) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // --- in ---
  // The handle's bytes, ready for use on `stream`.
  Bytes Acquire(Handle& handle, const BoundStream& stream);
  // Throws unless `bytes`, which `copy_in` has brought back, are those that were saved.
  void Verify(const Handle& handle, const Bytes& bytes, const Transfer& copy_in);
  // Without a copy back; no storage if there is none.
  Bytes BytesOnDevice(StorageRecord& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void FetchNow(Parcel& parcel, const BoundStream& stream);
  bool IsInHostMemory(const Parcel& parcel);
  void Prefetch(const StorageRecord& from);
  std::vector<ParcelPtr> ClaimForPrefetch(const StorageRecord& from, int64_t backward)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool FetchAhead(const std::vector<ParcelPtr>& parcels, int64_t backward);
  void EndFetch(Parcel& parcel, GuardedStorage fetched, int64_t backward)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void MarkRead(Handle& handle, Released& released) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  GuardedStorage TakeFetched(Parcel& parcel) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void DropUnreadPrefetches();
  void NoteBackward();
  void EndBackward(int64_t backward);

  // Whether a copy that could not be submitted may run all the same: its memory must be leaked.
  bool IsPoisoned() const ABSL_LOCKS_EXCLUDED(mu_);

  TraceSink* trace() const { return options_.engine.trace.get(); }

  uint64_t Window(uint64_t option) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  uint64_t BatchBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const OffloadOptions options_;
  const c10::Device device_;
  const LinkCalibration link_;
  const uint64_t largest_small_bytes_;
  const std::shared_ptr<TransferEngine> engine_;
  const std::shared_ptr<PinnedAllocator> allocator_;
  const std::shared_ptr<OffloadStatsRecorder> stats_;

  Mutex mu_;
  CondVar fetched_;
  // Registered records, by storage; a record is registered while it has live handles.
  absl::flat_hash_map<const c10::StorageImpl*, std::vector<StorageRecord*>> by_storage_
      ABSL_GUARDED_BY(mu_);
  uint64_t last_sequence_ ABSL_GUARDED_BY(mu_) = 0;
  // Parcels with live handles, by scope, in the order of packing of their last record: backward
  // needs that one first.
  std::map<std::pair<ScopeId, uint64_t>, Parcel*> order_ ABSL_GUARDED_BY(mu_);
  std::map<ScopeId, OpenScope> scopes_ ABSL_GUARDED_BY(mu_);
  std::list<Parcel*> window_ ABSL_GUARDED_BY(mu_);  // oldest first
  uint64_t window_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t prefetched_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  // After a refusal, prefetching pauses for this many unpacks, and for twice as many after the
  // next.
  uint64_t prefetch_pause_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t next_prefetch_pause_ ABSL_GUARDED_BY(mu_) = 1;
  ScopeBytes last_scope_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_set<int64_t> backwards_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion

#endif  // PINION_HOOKS_DEVICE_OFFLOADER_H_
