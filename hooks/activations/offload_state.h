// What the offloader of one device knows about saved tensors, under one lock.
//
// Ownership: DeviceOffloader's; TensorDepartures and TensorReturns work on it.

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

// Things to let go of once the lock is released: declare one before the lock is taken.
struct Released {
  GuardedMemories guarded;
  absl::InlinedVector<c10::Storage, 1> plain;  // no copy touches them

  void Add(GuardedMemory&& memory) {
    if (memory) guarded.push_back(std::move(memory));
  }
};

// Device memory that nobody needs any more but for its copy out. In a backward that has read it
// before it was evicted, the copy is likely to be under way: such memory goes once it adds up, or
// when the backward ends, so that a stream waits once for many copies, and not at once for each.
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

// Of tensors that are live.
struct Books {
  PendingTensors pending;
  SavedStorages storages = {};
  LateMemory late = {};
};

// The lock is taken before a parcel's own, and held while no device, allocator or LibTorch call is
// made.
struct OffloadState {
  OffloadState(ChosenSchedule by, PendingTensors none_yet, std::shared_ptr<DeviceShare> of_device)
      : share(std::move(of_device)),
        books{.pending = std::move(none_yet)},
        schedule(std::move(by)),
        planner(schedule.target),
        asks_for_device_bytes(schedule->AsksForDeviceBytes()) {}

  // What is allocated on the device, if the schedule asks. Get it before you take the lock, and
  // tell it before you ask for late leavers, evictions or fetches.
  uint64_t DeviceBytes(c10::Device device) const {
    return asks_for_device_bytes ? static_cast<uint64_t>(AllocatedBytes(device)) : 0;
  }

  void TellDeviceBytes(uint64_t device_bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    schedule->OnDeviceBytes(device_bytes, share->visiting_bytes());
  }

  // What weights that visit may count on, beside a plan.
  void TellShare() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    if (schedule.target != nullptr) share->Promise(schedule.target->Promise());
  }

  // What becomes of what was fetched of it, behind its last reader.
  Parcel::Afterwards AfterReading(const ScheduledParcel& parcel) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    return schedule->StaysFetched(parcel) ? Parcel::Afterwards::kKeep : Parcel::Afterwards::kLetGo;
  }

  // The parcel was evicted. `is_shared`: others hold the memory that it held. A parcel that was
  // gathered held a copy: the program may hold the tensors of which the copy was made.
  void NoteHeld(const SavedParcel& parcel, bool is_shared) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu, kRecordsLock) {
    if (schedule.target == nullptr) return;
    for (const StorageRecord* record : parcel.records) {
      const bool is_held = parcel.gathered ? !record->identity.expired() : is_shared;
      if (is_held) schedule.target->OnNotFreed(record->in_schedule.object);
    }
  }

  // Adds to `released` what was fetched of a parcel, if anything, and that nobody reads any more.
  // True if nobody has read it.
  bool LetGoOfFetched(GuardedMemory&& fetched, ScheduledParcel& parcel, Released& released)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    if (!fetched) return false;
    released.Add(std::move(fetched));
    return schedule->OnDropped(parcel);
  }

  // One more tensor was saved on the device, whatever becomes of it. Returns its number.
  uint64_t CountSave() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    ++last_sequence;
    if (schedule.counting != nullptr) schedule.counting->OnSaves(last_sequence);
    return last_sequence;
  }

  const uint64_t id = NewId();  // in the process; addresses repeat
  const std::shared_ptr<DeviceShare> share;

  Mutex mu;
  Books books ABSL_GUARDED_BY(mu);
  const ChosenSchedule schedule ABSL_GUARDED_BY(mu);
  // The schedule if it goes by plans, for what no lock is needed for.
  const PlannedSchedule* const planner;
  const bool asks_for_device_bytes;
  uint64_t last_sequence ABSL_GUARDED_BY(mu) = 0;              // of what was saved
  absl::flat_hash_set<int64_t> backwards ABSL_GUARDED_BY(mu);  // those that run

 private:
  static uint64_t NewId() {
    static std::atomic<uint64_t> last{0};
    return ++last;
  }
};

// Takes the state's lock.
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
