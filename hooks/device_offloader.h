// The saved tensors of one device: the rules of the data path have their home here.
//
//   pack     a copy out to a block of host memory, after the pack stream's present work; a handle
//   evict    once a window of bytes has passed, the pack stream waits for the copy (an event, never
//            the host) and the device storage is dropped. What counts is the memory that is held:
//            all of a storage, however little of it was saved
//   unpack   storage alive? use it. fetched? the current stream waits for it. else fetch now
//   prefetch the parcels that were packed before this one in the same scope, newest first, within a
//            window of bytes
//
// Nothing reads a saved tensor before the operator that saved it has returned (HasReturned): no
// copy, no gather, no checksum, no judgement on who holds it. That is known at the thread's next
// node, or at the end of the scope. Tensors that do not fill the link by themselves, as it is
// calibrated, then wait until they hold as much device memory as does, or a quarter of the window,
// or the scope ends, and leave as one batch. Small ones wait for each other in the same way and
// share a parcel.
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
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/device/trace_sink.h"
#include "pinion/engine/plan/link_calibration.h"
#include "pinion/engine/plan/window_size.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/hooks/guarded_storage.h"
#include "pinion/hooks/offload_options.h"
#include "pinion/hooks/offload_stats.h"
#include "pinion/hooks/parcel.h"
#include "pinion/hooks/saved_tensor_hooks.h"
#include "pinion/hooks/saved_version.h"
#include "pinion/hooks/scope_packer.h"
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
  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, bool maybe_held,
                                    const PackScope& scope);

  // No operator of the scope, which has ended, runs any more: what is pending of it goes, and the
  // windows learn what it saved.
  void EndScope(ScopeId scope);

  // Lets go of all device memory that can be fetched again, or that nobody needs any more: what was
  // fetched ahead and not read yet, and tensors whose copy out was submitted. Its streams wait for
  // the copies, the host does not.
  void FreeDeviceMemory();

  TransferEngine& engine() const { return *engine_; }
  const LinkCalibration& link() const { return link_; }

 private:
  class Handle;
  using RecordPtr = std::shared_ptr<StorageRecord>;
  using ParcelPtr = std::shared_ptr<Parcel>;

  // Things to let go of once mu_ is released.
  struct Released {
    std::vector<GuardedStorage> storages;
    std::vector<c10::Storage> plain;  // no copy touches them
  };

  // The records of a storage, all with live handles.
  struct SavedStorage {
    std::vector<StorageRecord*> records;
    // The parcel in the eviction window whose eviction lets go of the storage: the last one.
    Parcel* held_by = nullptr;
  };

  // Tries again after a refusal, less and less often.
  struct BackOff {
    uint64_t pause = 0;  // attempts that are left out
    uint64_t next_pause = 1;

    bool MayTry() {
      if (pause == 0) return true;
      --pause;
      return false;
    }
    void Refused() { pause = std::exchange(next_pause, 2 * next_pause); }
    void Worked() { next_pause = 1; }
  };

  // Where a backward's prefetching goes on: of the scope's parcels, those from `oldest` up to what
  // comes before `newest` have been looked at.
  struct PrefetchCursor {
    ScopeId scope = 0;  // no scope's number
    uint64_t oldest = 0;
    uint64_t newest = 0;
  };

  // A wait of a stream for a fetched parcel, which those for earlier ones need not repeat.
  struct LastWait {
    std::thread::id thread;
    int64_t backward = -1;
    c10::Stream stream;
    uint64_t number = 0;
  };

  struct OpenScope {
    ScopeSizes saved;
    std::vector<RecordPtr> in_use;  // their operators have not returned, as far as is known
    std::vector<RecordPtr> large;   // these wait for company
    std::vector<RecordPtr> small;
    uint64_t large_bytes = 0;
    uint64_t small_bytes = 0;
  };

  // What backward reads.
  struct Bytes {
    c10::Storage storage;
    int64_t shift_bytes = 0;  // from a place in the original storage to the same byte here
    // A copy of the host's bytes: nobody reaches it through the tensor that was saved.
    bool fetched = false;
  };

  // What leaves together: a parcel in the making.
  struct Leaving;

  at::Tensor Unpack(Handle& handle);
  void Release(Handle& handle);
  void Forget(StorageRecord& record, int64_t backward, Released& released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // `source` of that many bytes, all handles of which are gone, and which its copy out may still
  // read (none does if there are 0). In a backward, which has read it before it was evicted, the
  // copy is likely to be under way: such memory goes once it adds up to half of the window, or when
  // the backward ends, so that a stream waits once for many copies, and not at once for each.
  void LetGo(GuardedStorage source, uint64_t size_bytes, int64_t backward, Released& released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TakeLate(Released& released) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // --- out ---
  RecordPtr FindShared(const c10::Storage& storage, const SavedVersion& version,
                       const StorageExtent& extent, uint64_t item_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool IsSmall(const StorageRecord& record) const {
    return record.size_bytes() <= largest_small_bytes_;
  }
  // A new record. Returns those that are due.
  std::vector<RecordPtr> Register(const RecordPtr& record, const NodeId& node)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // One more operator has saved the record: nothing is to read it before that one, too, has
  // returned.
  void AwaitOperator(const RecordPtr& record, const NodeId& node)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // From `in_use` to those who wait for company.
  void EndOperator(OpenScope& scope, RecordPtr record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // It is in use or pending, and will be neither.
  void RemovePending(const StorageRecord& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Those who need not wait for company any longer: large ones do not wait for small ones, and
  // nobody waits once the scope ends.
  std::vector<RecordPtr> TakeDue(OpenScope& scope, bool ends) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Leaves that somebody holds stay; the others leave.
  void CopyOut(std::vector<RecordPtr> due);
  // Records of one pack stream.
  void SubmitCopyOut(const BoundStream& stream, const std::vector<RecordPtr>& records);
  std::vector<Leaving> PlanParcels(const BoundStream& stream,
                                   const std::vector<RecordPtr>& records);
  // Whether the tensors are small slices of storages that hold far more device memory than the
  // parcel.
  bool HoldsMuchMore(const Leaving& leaving);
  c10::Storage Gather(const Leaving& leaving);
  void TakeChecksums(const Leaving& leaving);
  void Publish(Leaving& leaving, const Transfer& copy, Released& released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void CopyOutBlocking(const RecordPtr& record);
  void EvictOverWindow();
  // The oldest go until no more counts in the window. One wait covers those of one stream.
  std::vector<GuardedStorage> EvictDownTo(uint64_t limit_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  GuardedStorage Evict(Parcel& parcel) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Their copies will not be made: the device keeps the bytes. They count as kept for `reason`.
  void KeepOnDevice(const std::vector<RecordPtr>& records, uint64_t OffloadStats::*reason)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void EnterWindow(Parcel& parcel) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void LeaveWindow(Parcel& parcel) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void SetHeldBytes(Parcel& parcel, uint64_t held_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The record, which is not in `storage` any more, does not hold it: another one may.
  void StopHolding(const StorageRecord& record, SavedStorage& storage)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // --- in ---
  // The handle's bytes, ready for use on `stream`.
  Bytes Acquire(Handle& handle, const BoundStream& stream);
  // Throws unless `bytes`, which `copy_in` has brought back, are those that were saved.
  void Verify(const Handle& handle, const Bytes& bytes, const Transfer& copy_in);
  // Without a copy back; no storage if there is none.
  Bytes BytesOnDevice(StorageRecord& record, Released& released) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // `stream` waits for the copy, unless it waits for a later one already.
  void WaitForCopyIn(const Transfer& copy, const BoundStream& stream);
  void FetchNow(Parcel& parcel, const BoundStream& stream);
  bool IsInHostMemory(const Parcel& parcel);
  void Prefetch(const StorageRecord& from);
  std::vector<ParcelPtr> ClaimForPrefetch(const StorageRecord& from, int64_t backward)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  bool FetchAhead(const std::vector<ParcelPtr>& parcels, int64_t backward);
  void EndFetch(Parcel& parcel, GuardedStorage fetched, int64_t backward)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void MarkRead(Handle& handle, Released& released) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // What was fetched, if anything: its readers are counted anew.
  GuardedStorage TakeFetched(Parcel& parcel) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Prefetching looks at all parcels again.
  void ResetCursors() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Lets go of what was fetched and not read, of what nobody needs any more but for its copy out,
  // and of what came back from those that it was lent to.
  void FreeUnneeded();
  void NoteBackward();
  void EndBackward(int64_t backward);

  // Whether a copy that could not be submitted may run all the same: its memory must be leaked.
  bool IsPoisoned() const ABSL_LOCKS_EXCLUDED(mu_);

  TraceSink* trace() const { return options_.engine.trace.get(); }

  uint64_t Window(uint64_t option) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // What `size_bytes` of one parcel count in that window.
  uint64_t ShareOfWindow(uint64_t option, uint64_t size_bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  uint64_t BatchBytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const OffloadOptions options_;
  const c10::Device device_;
  const LinkCalibration link_;
  const uint64_t largest_small_bytes_;
  const uint64_t full_batch_bytes_;
  const std::shared_ptr<TransferEngine> engine_;
  const std::shared_ptr<PinnedAllocator> allocator_;
  const std::shared_ptr<OffloadStatsRecorder> stats_;

  Mutex mu_;
  CondVar fetched_;
  // Registered records, by storage; a record is registered while it has live handles.
  absl::flat_hash_map<const c10::StorageImpl*, SavedStorage> by_storage_ ABSL_GUARDED_BY(mu_);
  uint64_t last_sequence_ ABSL_GUARDED_BY(mu_) = 0;
  // Parcels with live handles, by scope, in the order of packing of their last record: backward
  // needs that one first.
  std::map<std::pair<ScopeId, uint64_t>, Parcel*> order_ ABSL_GUARDED_BY(mu_);
  std::map<ScopeId, OpenScope> scopes_ ABSL_GUARDED_BY(mu_);
  BackOff gather_back_off_ ABSL_GUARDED_BY(mu_);    // in gathers
  std::list<Parcel*> window_ ABSL_GUARDED_BY(mu_);  // oldest first
  uint64_t window_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t prefetched_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  // What nobody needs any more but for its copy out (LetGo).
  std::vector<GuardedStorage> late_ ABSL_GUARDED_BY(mu_);
  uint64_t late_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  BackOff prefetch_back_off_ ABSL_GUARDED_BY(mu_);  // in unpacks
  std::optional<LastWait> last_wait_ ABSL_GUARDED_BY(mu_);
  ScopeSizes last_scope_ ABSL_GUARDED_BY(mu_);
  // Those that run, and -1 for whoever unpacks outside of one.
  absl::flat_hash_map<int64_t, PrefetchCursor> backwards_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion

#endif  // PINION_HOOKS_DEVICE_OFFLOADER_H_
