#include "pinion/hooks/activations/device_offloader.h"

#include <c10/core/Storage.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "pinion/allocator/base/slab.h"
#include "pinion/engine/link/packing.h"
#include "pinion/engine/stream/stream_in_use.h"
#include "pinion/hooks/activations/deferred_offloads.h"
#include "pinion/hooks/activations/exact_layout.h"
#include "pinion/hooks/activations/offload_state.h"
#include "pinion/hooks/activations/record_view.h"
#include "pinion/hooks/activations/saved_origin.h"
#include "pinion/hooks/activations/tensor_departures.h"
#include "pinion/hooks/autograd/lent_tensors.h"
#include "pinion/hooks/autograd/saved_version.h"
#include "pinion/hooks/autograd/tensor_checksum.h"
#include "pinion/hooks/plan/noted_objects.h"
#include "pinion/hooks/tier/torch_memory.h"

namespace pinion {
namespace {

// Returns the counter for a handle that was just created.
uint64_t OffloadStats::*CounterOf(const StorageRecord& record)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
  if (record.live_handles > 1) return &OffloadStats::shared;
  if (record.Stays()) return &OffloadStats::kept_as_planned;
  return record.IsCastAgain() ? &OffloadStats::cast_again : &OffloadStats::offloaded;
}

}  // namespace

// Replaces a saved tensor in the graph.
class DeviceOffloader::Handle final : public SavedTensor, public SlabObject<Handle> {
 public:
  Handle(std::shared_ptr<DeviceOffloader> owner, RecordView tensor)
      : owner_(std::move(owner)), tensor_(std::move(tensor)) {}
  ~Handle() override {
    owner_->Release(*this);
    if (owner_->learner_ != nullptr) owner_->learner_->TellOfRefusals();
  }

  at::Tensor Unpack() override {
    HostTimer timer(*owner_->stats_);
    tensor_.CheckVersion();
    at::Tensor tensor = owner_->Unpack(*this);
    timer.Count(&OffloadStats::unpacked);
    return tensor;
  }
  bool IsComputedAgain() const override { return record().cast != nullptr; }
  bool WasComputedAgain() const override { return was_cast_again; }
  const void* MemoryOwner() const override {
    OffloadLock lock(owner_->state_);
    return record().HoldsMemory() ? &record() : nullptr;
  }

  StorageRecord& record() const { return tensor_.record(); }
  const RecordView& tensor() const { return tensor_; }
  const SavedView& view() const { return tensor_.view(); }

  Parcel::Reader reader;  // for the record's parcel, once it has one
  std::atomic<bool> was_cast_again = false;
  // The fetched storage; set with a memory target. It is freed with the handle, like the storage of
  // a resident tensor. Freed earlier, what the node allocates behind its read would be recorded as
  // if that were free, also for steps in which the tensor stays.
  c10::Storage fetched;

 private:
  const std::shared_ptr<DeviceOffloader> owner_;
  const RecordView tensor_;
};

DeviceOffloader::DeviceOffloader(const OffloadOptions& options, c10::Device device,
                                 const LinkCalibration& link, std::shared_ptr<HostTier> host,
                                 std::shared_ptr<DeviceTier> tier,
                                 std::shared_ptr<OffloadStatsRecorder> stats)
    : options_(options),
      device_(device),
      link_(link),
      host_(std::move(host)),
      tier_(std::move(tier)),
      stats_(std::move(stats)),
      state_(ScheduleFor(options, link),
             PendingTensors(LargestSmallPiece(link), /*batches_tensors=*/options.overlap),
             tier_->share()),
      departures_(options_, link_, device_, *tier_, state_, *stats_),
      returns_(options_, *tier_, state_, *stats_),
      learner_(state_.planner == nullptr
                   ? nullptr
                   : std::make_unique<StepLearner>(device_, options_, tier_, state_)) {}

DeviceOffloader::Packed DeviceOffloader::Pack(const at::Tensor& tensor, const NodeId& node,
                                              uint64_t place, bool is_leaf,
                                              std::unique_ptr<const ParameterCast> cast,
                                              const PackScope& scope) {
  const ScopedRange range(trace(), "pinion.pack", tensor.nbytes());
  const BoundStream stream(CurrentStream(device_));
  const StreamInUse in_use(tier_->engine().device(), stream.native);
  const auto keep = [this](uint64_t OffloadStats::*reason) {
    stats_->Update([reason](OffloadStats& stats) { ++(stats.*reason); });
    return Packed();
  };
  if (!tier_->engine().health().ok()) return keep(&OffloadStats::kept_copy_failed);
  const absl::StatusOr<bool> capturing = tier_->engine().IsCapturing(stream.native);
  if (!capturing.ok()) return keep(&OffloadStats::kept_copy_failed);
  if (*capturing) return keep(&OffloadStats::kept_capturing);

  const c10::Storage& storage = tensor.storage();
  SavedVersion version(tensor);
  const StorageExtent read = ExtentOf(tensor);
  const StorageExtent extent = ExtentToSave(read, storage.nbytes());
  if (extent.size_bytes() != storage.nbytes()) cast.reset();
  // Another stream may have allocated the cast; its owner may free it while the operator reads it.
  if (cast != nullptr && !TryRecordOnStream(storage, stream.torch)) cast.reset();
  // Before the operator returns: operators do not write the weights that they save.
  TensorChecksum checksum;
  if (cast != nullptr && options_.verify) {
    try {
      checksum = TensorChecksum::Of(storage, extent);
    } catch (const c10::OutOfMemoryError&) {
      cast.reset();  // an operator's save must not fail
    }
  }
  RecordPtr record;
  DueRecords due;
  bool is_new = false;
  Released released;  // freed after the lock
  const uint64_t device_bytes = DeviceBytes();
  {
    OffloadLock lock(state_);
    state_.TellDeviceBytes(device_bytes);
    state_.books.pending.NoteSave(node);
    const uint64_t sequence = state_.CountSave();
    record = state_.books.storages.Find(storage, version, read);
    // The record's parameter has changed and cannot be recast. `tensor` has the bytes.
    if (record != nullptr && record->IsCastAgain() && !record->cast->IsUnchanged()) record.reset();
    if (record != nullptr) {
      if (record->IsAwaited()) state_.books.pending.AwaitOperator(record, node);
      if (record->Stays()) record->NoteSaver(node, scope.id);
      state_.schedule->OnUsed(record->in_schedule.object, AccessKind::kSaved);
      // Backward reads it sooner than what was saved in between.
      if (record->scope == scope.id) record->in_schedule.sequence = sequence;
      if (SavedParcel* const parcel = record->in_parcel.parcel().get()) {
        parcel->AddReaders(1);
        state_.schedule->OnSavedAgain(*parcel, record->place());
      }
    } else {
      // EndScope has submitted the scope's copies and would not submit this one.
      if (scope.ended) return keep(&OffloadStats::kept_scope_ended);
      is_new = true;
      record = std::allocate_shared<StorageRecord>(SlabAllocator<StorageRecord>(), storage,
                                                   std::move(version), extent, stream, scope.id,
                                                   std::move(cast), tensor, node);
      record->checksum = std::move(checksum);
      record->in_schedule.sequence = sequence;
      state_.books.storages.Add(*record);
      const uint64_t signature =
          learner_ == nullptr ? 0 : SignatureOf(tensor, place, record->size_bytes());
      const SaveDecision decision =
          state_.schedule->OnSaved(scope.id, {record->size_bytes(), signature});
      record->in_schedule.object = decision.object;
      if (is_leaf && !options_.offload_leaves && !decision.even_if_held)
        record->leaving.StayIfHeld();
      if (decision.leaves && record->cast != nullptr) {
        record->LeaveToBeCastAgain();  // the tensor holds the source as well
      } else if (decision.leaves) {
        state_.books.pending.Add(record, node);
      } else {
        record->NoteSaver(node, scope.id);
        state_.books.storages.NoteStays(*record);
      }
    }
    if (!scope.ended) {
      due.Add(state_.books.pending.TakeDue(scope.id, node, state_.schedule->BatchBytes()));
    }
    TakeDeferredOffloads(state_, *stats_, node, due, released);
    ++record->live_handles;
    stats_->Update([&, counter = CounterOf(*record)](OffloadStats& stats) {
      ++stats.live_handles;
      ++(stats.*counter);
      if (counter == &OffloadStats::offloaded) stats.offloaded_bytes += record->size_bytes();
    });
  }
  NotedAs* const noted = &record->noted;
  auto handle =
      std::make_unique<Handle>(shared_from_this(), RecordView(std::move(record), tensor, is_new));
  departures_.CopyOut(due);
  OffloadForTarget(state_, *stats_, device_, node, departures_);
  if (learner_ != nullptr) learner_->EndAccess();
  return {std::move(handle), noted};
}

uint64_t DeviceOffloader::DeviceBytes() {
  if (!state_.asks_for_device_bytes) return 0;
  return learner_->NoteDeviceBytes();
}

void DeviceOffloader::EndScope(ScopeId scope) {
  const auto end = [&] {
    const ScopedRange range(trace(), "pinion.end_scope");
    DueRecords due;
    {
      OffloadLock lock(state_);
      due.Add(state_.books.pending.EndScope(scope));
      due.Sort(state_);
    }
    departures_.CopyOut(due);
    OffloadLock lock(state_);
    state_.schedule->OnScopeEnd(scope);
  };
  learner_ == nullptr ? end() : learner_->EndScope(end);
}

at::Tensor DeviceOffloader::Unpack(Handle& handle) {
  StorageRecord& record = handle.record();
  const ScopedRange range(trace(), "pinion.unpack", record.size_bytes());
  const BoundStream stream(CurrentStream(device_));
  handle.fetched = c10::Storage();  // of an earlier read by the same node
  const int64_t backward = CurrentBackward();
  std::optional<StreamInUse> in_use;
  if (backward != -1) in_use.emplace(tier_->engine().device(), stream.native);
  NoteBackward(backward);
  if (learner_ != nullptr) {
    const bool is_kept = backward != -1 && BackwardKeepsGraph();
    // Before the schedule counts memory. Without a kept graph, Release() does this.
    if (is_kept) SettleLoans();
    const AccessKind how = BackwardMakesGraph() ? AccessKind::kReadIntoGraph
                           : is_kept            ? AccessKind::kReadAndKept
                                                : AccessKind::kRead;
    DueRecords due;
    Released released;  // freed after the lock
    NodeId last_saver;
    const uint64_t device_bytes = DeviceBytes();
    {
      OffloadLock lock(state_);
      state_.TellDeviceBytes(device_bytes);
      state_.schedule->OnUsed(record.in_schedule.object, how);
      if (record.HasToBeCast()) state_.schedule->OnRecast(record.in_schedule.object);
      last_saver = state_.books.pending.last_saver();
      TakeDeferredOffloads(state_, *stats_, last_saver, due, released);
    }
    departures_.CopyOut(due);
    OffloadForTarget(state_, *stats_, device_, last_saver, departures_);
  }
  BytesOnDevice bytes = returns_.Acquire(record, {handle.reader, stream, backward},
                                         [&handle] { return handle.view().Describe(); });
  LayOutForUserCode(record, stream, returns_, bytes);
  handle.was_cast_again = bytes.cast_again;
  returns_.Prefetch(record, backward);
  if (learner_ != nullptr) learner_->EndAccess();
  // Autograd may modify a fetched copy that has no other reader. It must not modify the original
  // memory, which other handles find while it lives.
  if (bytes.is_copy && backward != -1 && !BackwardKeepsGraph()) {
    SettleLoans();
    const bool is_alone = bytes.storage.use_count() == 1;
    if (learner_ != nullptr) handle.fetched = bytes.storage;
    if (is_alone) {
      return handle.view().Over(std::move(bytes.storage), bytes.shift_bytes, bytes.keys, nullptr);
    }
  }
  // Other readers detect an in-place change of a shared tensor, as without offload.
  return handle.tensor().Lend(std::move(bytes.storage), bytes.shift_bytes, bytes.keys);
}

void DeviceOffloader::NoteBackward(int64_t backward) {
  // The thread's last report. A backward unpacks many tensors in a row.
  thread_local std::pair<uint64_t, int64_t> noted = {0, -1};
  if (backward == -1 || noted == std::pair(state_.id, backward)) return;
  noted = {state_.id, backward};
  {
    OffloadLock lock(state_);
    if (!state_.backwards.insert(backward).second) return;
    state_.schedule->OnBackwardBegin(backward);
  }
  AtEndOfBackward([self = shared_from_this(), backward] { self->returns_.EndBackward(backward); });
}

void DeviceOffloader::Release(Handle& handle) {
  StorageRecord& record = handle.record();
  const int64_t backward = CurrentBackward();
  // Plans expect the memory to be free when the node that has read it is done.
  if (learner_ != nullptr && backward != -1) SettleLoans();
  Released released;
  OffloadLock lock(state_);
  // The handle still shares the record and thereby the parcel: neither is freed under the lock.
  SavedParcel* const parcel = record.in_parcel.parcel().get();
  uint64_t dropped = 0;
  if (parcel != nullptr) {
    dropped += state_.LetGoOfFetched(parcel->RemoveReader(handle.reader), *parcel, released);
  }
  if (--record.live_handles == 0) {
    Forget(record, backward, released);
    if (learner_ != nullptr && !state_.schedule.target->IsInStep()) learner_->EndStep();
  }
  state_.TellShare();
  const bool gone = parcel != nullptr && parcel->records.empty();
  if (gone) dropped += state_.schedule->OnGone(*parcel);
  stats_->Update([dropped](OffloadStats& stats) {
    --stats.live_handles;
    stats.prefetches_dropped += dropped;
  });
  if (gone && parcel->gathered) {
    LetGo(parcel->TakeHeld(0), parcel->size_bytes, backward, released);
  }
}

void DeviceOffloader::Forget(StorageRecord& record, int64_t backward, Released& released) {
  if (record.IsAwaited()) state_.books.pending.Remove(record);
  state_.books.storages.Remove(record);
  state_.schedule->OnReleased(record.in_schedule.object);
  if (record.IsCastAgain()) return;
  if (record.in_parcel.parcel() == nullptr) {
    // No copy out was submitted.
    LetGo(GuardedMemory(TorchMemory(record.leaving.TakeSource()), record.pack_stream.native,
                        Transfer(), kFreeAfterCopy),
          /*size_bytes=*/0, backward, released);
    return;
  }
  SavedParcel& parcel = *record.in_parcel.parcel();
  parcel.records.erase(std::find(parcel.records.begin(), parcel.records.end(), &record));
  // The schedule may reuse the number.
  parcel.objects.erase(std::ranges::find(parcel.objects, record.in_schedule.object));
  if (parcel.gathered) return;
  state_.schedule->OnPieceGone(parcel, record.storage());
  LetGo(record.in_parcel.TakeHeld(), record.storage_bytes, backward, released);
}

void DeviceOffloader::LetGo(GuardedMemory&& memory, uint64_t size_bytes, int64_t backward,
                            Released& released) {
  if (!memory) return;
  // Defer only if EndBackward will free the memory and no other record refers to the storage.
  const auto* storage = static_cast<const c10::StorageImpl*>(memory.memory().owner());
  if (size_bytes == 0 || !state_.backwards.contains(backward) ||
      state_.books.storages.Contains(storage)) {
    released.Add(std::move(memory));
    return;
  }
  state_.books.late.Add(std::move(memory), size_bytes);
  if (state_.books.late.size_bytes() > state_.schedule->LateBytes())
    state_.books.late.Take(released);
}

}  // namespace pinion
