// The state of one device's DeviceOffloader, under one lock.
//
// Ownership: a DeviceOffloader owns it and shares it with TensorDepartures and TensorReturns.

#ifndef PINION_HOOKS_ACTIVATIONS_OFFLOAD_STATE_H_
#define PINION_HOOKS_ACTIVATIONS_OFFLOAD_STATE_H_

#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/engine/schedule/offload_schedule.h"
#include "pinion/engine/tier/device_share.h"
#include "pinion/engine/tier/guarded_memory.h"
#include "pinion/hooks/activations/offload_schedules.h"
#include "pinion/hooks/activations/pending_tensors.h"
#include "pinion/hooks/activations/saved_storages.h"
#include "pinion/hooks/activations/storage_record.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {

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
    schedule->OnDeviceBytes(device_bytes, share->visiting_bytes());
  }

  // Reports to the weight streamer how much memory it may use beside the plan.
  void TellShare() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    if (schedule.target != nullptr) share->Promise(schedule.target->Promise());
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
    ++last_sequence;
    if (schedule.counting != nullptr) schedule.counting->OnSaves(last_sequence);
    return last_sequence;
  }

  const uint64_t id = NewId();  // unique in the process, unlike addresses
  const std::shared_ptr<DeviceShare> share;

  Mutex mu;
  Books books ABSL_GUARDED_BY(mu);
  const ChosenSchedule schedule ABSL_GUARDED_BY(mu);
  // The schedule if it goes by plans, for what no lock is needed for.
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

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_OFFLOAD_STATE_H_
