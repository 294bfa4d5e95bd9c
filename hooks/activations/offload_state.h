// The state of one device's DeviceOffloader, under one lock: its schedule, the saved tensors that
// wait for their copy, and the records of those that live.
//
// Ownership: a DeviceOffloader owns it and shares it with TensorDepartures and TensorReturns.

#ifndef PINION_HOOKS_ACTIVATIONS_OFFLOAD_STATE_H_
#define PINION_HOOKS_ACTIVATIONS_OFFLOAD_STATE_H_

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/schedule/offload_schedule.h"
#include "pinion/engine/schedule/planned_schedule.h"
#include "pinion/engine/tier/device_share.h"
#include "pinion/engine/tier/guarded_memory.h"
#include "pinion/hooks/activations/live_tensor.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/storage_record.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/saved_version.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {

struct ChosenSchedule {
  OffloadSchedule* operator->() const { return schedule.get(); }

  std::unique_ptr<OffloadSchedule> schedule;
  PlannedSchedule* target = nullptr;  // the same, if it runs by plans
};

// A PlannedSchedule with a memory target; without one, a schedule by windows.
ChosenSchedule ScheduleFor(const OffloadOptions& options, const LinkCalibration& link);

// Saved tensors whose copy out has not begun, because their operator may still run or because they
// wait to be batched.
//
// No copy reads a saved tensor before the operator that saved it has returned (HasReturned), which
// is known at the thread's next node or at the end of the scope. A tensor that is too small to fill
// the link then waits until the waiting tensors of its scope hold a full batch of device memory, or
// the scope ends. Small tensors wait in the same way to share a parcel.
class PendingTensors {
 public:
  // Tensors up to `largest_small_bytes` are small (packing.h). Without `batches_tensors` each
  // record is due at once.
  PendingTensors(uint64_t largest_small_bytes, bool batches_tensors)
      : largest_small_bytes_(largest_small_bytes), batches_tensors_(batches_tensors) {}

  // Reports that `node` is about to save in the scope, which shows that earlier operators have
  // returned. Returns the records of full batches (`batch_bytes`), in the order of packing.
  RecordPtrs TakeDue(ScopeId scope, const NodeId& node, uint64_t batch_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);

  // Reports that `node`, on any thread, has saved something.
  void NoteSave(const NodeId& node) { last_saver_ = node; }
  const NodeId& last_saver() const { return last_saver_; }

  // Adds a record to offload, saved by `node`.
  void Add(const RecordPtr& record, const NodeId& node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);

  // Returns whether operators of the scope may still run: it has saved something and not ended.
  bool IsOpen(ScopeId scope) const { return scopes_.contains(scope); }
  bool IsAnyOpen() const { return !scopes_.empty(); }

  // Reports that `node` has also saved an awaited record, whose copy then waits for that operator.
  void AwaitOperator(const RecordPtr& record, const NodeId& node)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);

  // Removes and returns awaited records that `node`, which has not returned, has saved.
  RecordPtrs TakeSavedBy(const NodeId& node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);

  // Removes an awaited record that is not needed.
  void Remove(const StorageRecord& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);

  // Adds a resident record whose deferred offload waits for an operator of a later scope. After
  // TakeDeferredOffloads the caller must check whether each is still needed.
  void AddDeferredOffload(const RecordPtr& record) { deferred_offloads_.push_back(record); }
  std::vector<std::weak_ptr<StorageRecord>> TakeDeferredOffloads() {
    return std::exchange(deferred_offloads_, {});
  }

  // Returns all records of the scope, whose operators have all returned.
  RecordPtrs EndScope(ScopeId scope) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);

 private:
  struct Scope {
    std::vector<RecordPtr> in_use;  // their operators may still run
    RecordPtrs large;               // waiting to be batched
    RecordPtrs small;
    uint64_t large_bytes = 0;
    uint64_t small_bytes = 0;
  };

  bool IsSmall(const StorageRecord& record) const {
    return record.size_bytes() <= largest_small_bytes_;
  }
  void EndOperator(Scope& scope, RecordPtr record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);
  // Large records do not wait for small ones.
  static RecordPtrs Take(Scope& scope, bool large, bool small)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);

  const uint64_t largest_small_bytes_;
  const bool batches_tensors_;
  std::map<ScopeId, Scope> scopes_;  // open scopes
  std::vector<std::weak_ptr<StorageRecord>> deferred_offloads_;
  NodeId last_saver_ = {};
};

// Finds the record whose bytes a newly saved tensor can share.
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

// Memory to free after the lock is released: declare it before the lock is taken.
struct Released {
  GuardedMemories guarded;
  absl::InlinedVector<c10::Storage, 1> plain;  // no pending copy uses them

  void Add(GuardedMemory&& memory) {
    if (memory) guarded.push_back(std::move(memory));
  }
};

// Device memory of released tensors whose D2H copy may still be running. Backward leaves such
// memory if it reads a tensor before its eviction. It is freed in batches or when the backward
// ends, so that a stream waits once for many copies.
class LateMemory {
 public:
  void Add(GuardedMemory&& memory, uint64_t size_bytes) {
    AddByStream(std::move(memory), memory_);
    size_bytes_ += size_bytes;
  }
  uint64_t size_bytes() const { return size_bytes_; }
  void Take(Released& released) {
    for (GuardedMemory& memory : memory_) released.Add(std::move(memory));
    memory_.clear();
    size_bytes_ = 0;
  }

 private:
  GuardedMemories memory_;
  uint64_t size_bytes_ = 0;
};

// The tables of live tensors.
struct Books {
  PendingTensors pending;
  SavedStorages storages = {};
  LateMemory late = {};
};

// Lock order: before a parcel's own lock. No device, allocator or LibTorch call under the lock.
struct OffloadState {
  OffloadState(ChosenSchedule by, PendingTensors none_yet, std::shared_ptr<DeviceShare> of_device)
      : share(std::move(of_device)),
        books{.pending = std::move(none_yet)},
        schedule(std::move(by)),
        planner(schedule.target),
        asks_for_device_bytes(schedule->AsksForDeviceBytes()) {}

  // Returns the bytes allocated on the device if the schedule uses them, else 0. Call it without
  // the lock. Pass them to TellDeviceBytes before taking deferred offloads, evictions or fetches.
  uint64_t DeviceBytes(c10::Device device) const {
    return asks_for_device_bytes ? static_cast<uint64_t>(AllocatedBytes(device)) : 0;
  }

  void TellDeviceBytes(uint64_t device_bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    schedule->OnDeviceBytes(device_bytes, share->streamed_bytes());
  }

  // Reports to the weight streamer how much memory it may use beside the plan.
  void TellShare() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    if (schedule.target != nullptr) share->SetPeakBound(schedule.target->StepPeakBound());
  }

  // Returns what happens to a fetched parcel after its last reader.
  Parcel::Afterwards AfterReading(const ScheduledParcel& parcel) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    return schedule->StaysFetched(parcel) ? Parcel::Afterwards::kKeep : Parcel::Afterwards::kLetGo;
  }

  // Reports an evicted parcel whose memory was not freed; `is_shared` says that it has other
  // owners. A gathered parcel held copies: there the tensors' own storages decide.
  void NoteHeld(const SavedParcel& parcel, bool is_shared) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu, kRecordsLock) {
    if (schedule.target == nullptr) return;
    for (const StorageRecord* record : parcel.records) {
      const bool is_held = parcel.gathered ? !record->identity.expired() : is_shared;
      if (is_held) schedule.target->OnNotFreed(record->in_schedule.object);
    }
  }

  // Adds fetched memory that no reader needs, if any, to `released`. Returns whether it was never
  // read.
  bool LetGoOfFetched(GuardedMemory&& fetched, ScheduledParcel& parcel, Released& released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    if (!fetched) return false;
    released.Add(std::move(fetched));
    return schedule->OnDropped(parcel);
  }

  // Counts a tensor that was saved on the device, kept or not. Returns its sequence number.
  uint64_t CountSave() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    schedule->OnSaves(++last_sequence);
    return last_sequence;
  }

  const uint64_t id = NewId();  // unique in the process, unlike addresses
  const std::shared_ptr<DeviceShare> share;

  Mutex mu;
  Books books ABSL_GUARDED_BY(mu);
  const ChosenSchedule schedule ABSL_GUARDED_BY(mu);
  // The same schedule if it runs by plans, for calls that need no lock.
  const PlannedSchedule* const planner;
  const bool asks_for_device_bytes;
  uint64_t last_sequence ABSL_GUARDED_BY(mu) = 0;              // of the newest save
  absl::flat_hash_set<int64_t> backwards ABSL_GUARDED_BY(mu);  // ids of running backwards

 private:
  static uint64_t NewId() {
    static std::atomic<uint64_t> last{0};
    return ++last;
  }
};

// Holds the state's lock.
class [[nodiscard]] ABSL_SCOPED_LOCKABLE OffloadLock {
 public:
  [[nodiscard]] explicit OffloadLock(OffloadState& state)
      ABSL_EXCLUSIVE_LOCK_FUNCTION(state.mu, kRecordsLock)
      : lock_(state.mu) {}
  ~OffloadLock() ABSL_UNLOCK_FUNCTION() = default;

 private:
  const MutexLock lock_;
};

// Appends the records with live handles, in the order of their last save. Takes the state's lock;
// formats texts outside it.
void AppendLiveOf(OffloadState& state, c10::Device device, std::vector<LiveTensor>& tensors);

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_OFFLOAD_STATE_H_
