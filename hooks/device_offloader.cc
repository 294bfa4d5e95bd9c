// Which tensors leave, and what becomes of them when nobody needs them any more. The copies are in
// device_offloader_out.cc and device_offloader_unpack.cc.

#include "pinion/hooks/device_offloader.h"

#include <algorithm>
#include <utility>

#include "pinion/allocator/base/bytes.h"
#include "pinion/engine/plan/pack_plan.h"
#include "pinion/hooks/device_offloader_handle.h"

namespace pinion {
namespace {

// All of the storage when the tensor covers half of it or more, so that its other views share one
// copy; else only what the tensor can touch (a small view of a flat buffer must not move it all).
StorageExtent ExtentToSave(const at::Tensor& tensor) {
  const uint64_t storage_bytes = tensor.storage().nbytes();
  StorageExtent extent = ExtentOf(tensor);
  if (2 * extent.size_bytes() >= storage_bytes) return {0, storage_bytes};
  extent.begin_bytes &= ~(kPackAlignmentBytes - 1);
  return extent;
}

// Of the parcel's records that have live handles.
uint64_t RecordBytes(const Parcel& parcel) {
  uint64_t bytes = 0;
  for (const StorageRecord* record : parcel.records) bytes += record->size_bytes();
  return bytes;
}

}  // namespace

DeviceOffloader::DeviceOffloader(const OffloadOptions& options, c10::Device device,
                                 const LinkCalibration& link,
                                 std::shared_ptr<TransferEngine> engine,
                                 std::shared_ptr<PinnedAllocator> allocator,
                                 std::shared_ptr<OffloadStatsRecorder> stats)
    : options_(options),
      device_(device),
      link_(link),
      largest_small_bytes_(LargestSmallPiece(link)),
      full_batch_bytes_(FullBatchBytes(link)),
      engine_(std::move(engine)),
      allocator_(std::move(allocator)),
      stats_(std::move(stats)) {}

uint64_t DeviceOffloader::Window(uint64_t option) const {
  if (option != OffloadOptions::kAutoWindow) return option;
  uint64_t window_bytes = AutoWindowBytes(ScopeSizes(), last_scope_);
  for (const auto& [id, scope] : scopes_) {
    window_bytes = std::max(window_bytes, AutoWindowBytes(scope.saved, last_scope_));
  }
  return window_bytes;
}

uint64_t DeviceOffloader::ShareOfWindow(uint64_t option, uint64_t size_bytes) const {
  if (option != OffloadOptions::kAutoWindow) return size_bytes;
  return std::min(size_bytes, Window(option) / 2);
}

uint64_t DeviceOffloader::BatchBytes() const {
  return std::min(full_batch_bytes_, Window(options_.eviction_window_bytes) / 4);
}

bool DeviceOffloader::IsPoisoned() const { return !engine_->health().ok(); }

// ---------------------------------------------------------------------------------------- pack

std::unique_ptr<SavedTensor> DeviceOffloader::Pack(const at::Tensor& tensor, bool maybe_held,
                                                   const PackScope& scope) {
  const ScopedRange range(trace(), "pinion.pack", tensor.nbytes());
  const BoundStream stream(CurrentStream(device_));
  const auto keep = [this](uint64_t OffloadStats::*reason) {
    stats_->Update([reason](OffloadStats& stats) { ++(stats.*reason); });
    return nullptr;
  };
  if (IsPoisoned()) return keep(&OffloadStats::kept_copy_failed);
  const absl::StatusOr<bool> capturing = engine_->IsCapturing(stream.native);
  if (!capturing.ok()) return keep(&OffloadStats::kept_copy_failed);
  if (*capturing) return keep(&OffloadStats::kept_capturing);

  const c10::Storage& storage = tensor.storage();
  const SavedVersion version(tensor);
  const StorageExtent read = ExtentOf(tensor);
  const StorageExtent extent = ExtentToSave(tensor);
  const NodeId node = CurrentNode();
  RecordPtr record;
  std::vector<RecordPtr> due;
  {
    MutexLock lock(mu_);
    record = FindShared(storage, version, read, tensor.itemsize());
    if (record != nullptr) {
      if (record->IsAwaited()) AwaitOperator(record, node);
      if (record->parcel != nullptr) ++record->parcel->live_handles;
    } else {
      // EndScope would not send it on its way any more.
      if (scope.ended) return keep(&OffloadStats::kept_scope_ended);
      record =
          std::make_shared<StorageRecord>(storage, version, extent, stream, maybe_held, scope.id);
      due = Register(record, node);
    }
    ++record->live_handles;
    stats_->Update([&](OffloadStats& stats) {
      ++stats.live_handles;
      if (record->live_handles > 1) {
        ++stats.shared;
        return;
      }
      ++stats.offloaded;
      stats.offloaded_bytes += record->size_bytes();
    });
  }
  auto handle = std::make_unique<Handle>(shared_from_this(), std::move(record), tensor);
  CopyOut(std::move(due));
  EvictOverWindow();
  return handle;
}

std::vector<DeviceOffloader::RecordPtr> DeviceOffloader::Register(const RecordPtr& record,
                                                                  const NodeId& node) {
  SavedStorage& saved = by_storage_[record->identity._unsafe_get_target()];
  record->pending_bytes = saved.records.empty() ? record->storage_bytes : record->size_bytes();
  saved.records.push_back(record.get());
  record->sequence = ++last_sequence_;
  OpenScope& open = scopes_[record->scope];
  open.saved.Add(record->size_bytes());
  for (RecordPtr& earlier : std::exchange(open.in_use, {})) {
    absl::InlinedVector<NodeId, 1>& nodes = earlier->nodes;
    nodes.erase(std::remove_if(nodes.begin(), nodes.end(),
                               [&](const NodeId& saver) { return HasReturned(saver, node); }),
                nodes.end());
    if (nodes.empty()) {
      EndOperator(open, std::move(earlier));
    } else {
      open.in_use.push_back(std::move(earlier));
    }
  }
  open.in_use.push_back(record);
  record->nodes.push_back(node);
  return TakeDue(open, /*ends=*/false);
}

DeviceOffloader::RecordPtr DeviceOffloader::FindShared(const c10::Storage& storage,
                                                       const SavedVersion& version,
                                                       const StorageExtent& extent,
                                                       uint64_t item_bytes) {
  const auto found = by_storage_.find(storage.unsafeGetStorageImpl());
  if (found == by_storage_.end()) return nullptr;
  // Newest first: what was saved since at another version, even by another counter, says that the
  // bytes may have changed.
  for (auto it = found->second.records.rbegin(); it != found->second.records.rend(); ++it) {
    StorageRecord& record = **it;
    if (record.extent.end_bytes <= extent.begin_bytes ||
        extent.end_bytes <= record.extent.begin_bytes) {
      continue;
    }
    if (record.version != version || !record.HasItsMemory(storage)) return nullptr;
    if (record.extent.begin_bytes <= extent.begin_bytes &&
        extent.end_bytes <= record.extent.end_bytes &&
        record.extent.begin_bytes % item_bytes == 0) {
      return record.shared_from_this();
    }
  }
  return nullptr;
}

void DeviceOffloader::EndScope(ScopeId scope) {
  const ScopedRange range(trace(), "pinion.end_scope");
  std::vector<RecordPtr> due;
  {
    MutexLock lock(mu_);
    const auto found = scopes_.find(scope);
    if (found == scopes_.end()) return;  // it saved nothing on this device
    OpenScope& open = found->second;
    for (RecordPtr& saved : std::exchange(open.in_use, {})) EndOperator(open, std::move(saved));
    due = TakeDue(open, /*ends=*/true);
  }
  CopyOut(std::move(due));
  EvictOverWindow();
  MutexLock lock(mu_);
  const auto ended = scopes_.extract(scope);
  if (!ended.empty()) last_scope_ = ended.mapped().saved;
}

// --------------------------------------------------------------------------------------- evict

// What is held counts once, for the parcel that lets go of it: where parcels share a storage, that
// is the one that came last, since they are evicted in their order.
void DeviceOffloader::EnterWindow(Parcel& parcel) {
  parcel.window_position = window_.insert(window_.end(), &parcel);
  uint64_t held_bytes = 0;
  if (parcel.gathered) {
    held_bytes = parcel.size_bytes();
  } else {
    for (const StorageRecord* record : parcel.records) {
      Parcel*& held_by = by_storage_[record->identity._unsafe_get_target()].held_by;
      if (held_by == &parcel) continue;
      if (held_by != nullptr) SetHeldBytes(*held_by, held_by->held_bytes - record->storage_bytes);
      held_by = &parcel;
      held_bytes += record->storage_bytes;
    }
  }
  SetHeldBytes(parcel, held_bytes);
}

void DeviceOffloader::LeaveWindow(Parcel& parcel) {
  if (!parcel.window_position.has_value()) return;
  SetHeldBytes(parcel, 0);
  window_.erase(*parcel.window_position);
  parcel.window_position.reset();
  for (const StorageRecord* record : parcel.records) {
    Parcel*& held_by = by_storage_[record->identity._unsafe_get_target()].held_by;
    if (held_by == &parcel) held_by = nullptr;
  }
}

void DeviceOffloader::SetHeldBytes(Parcel& parcel, uint64_t held_bytes) {
  const uint64_t window_bytes = ShareOfWindow(options_.eviction_window_bytes, held_bytes);
  window_bytes_ += window_bytes;
  window_bytes_ -= std::exchange(parcel.window_bytes, window_bytes);
  parcel.held_bytes = held_bytes;
}

void DeviceOffloader::StopHolding(const StorageRecord& record, SavedStorage& storage) {
  if (storage.held_by != record.parcel.get()) return;
  Parcel* other = nullptr;
  for (auto it = storage.records.rbegin(); it != storage.records.rend() && other == nullptr; ++it) {
    if (!(*it)->source || (*it)->parcel == nullptr) continue;
    if ((*it)->parcel->window_position.has_value()) other = (*it)->parcel.get();
  }
  Parcel* const holder = std::exchange(storage.held_by, other);
  if (holder == other) return;
  SetHeldBytes(*holder, holder->held_bytes - record.storage_bytes);
  if (other != nullptr) SetHeldBytes(*other, other->held_bytes + record.storage_bytes);
}

std::vector<GuardedStorage> DeviceOffloader::EvictDownTo(uint64_t limit_bytes) {
  std::vector<GuardedStorage> evicted;
  while (window_bytes_ > limit_bytes) {
    GuardedStorage next = Evict(*window_.front());
    if (!next) continue;
    if (!evicted.empty() && evicted.back().stream().torch == next.stream().torch) {
      evicted.back().Add(std::move(next));  // the later of the two copies covers both
    } else {
      evicted.push_back(std::move(next));
    }
  }
  return evicted;
}

void DeviceOffloader::EvictOverWindow() {
  std::vector<GuardedStorage> evicted;  // let go of after mu_
  uint64_t evicted_bytes = 0;
  {
    MutexLock lock(mu_);
    const uint64_t before_bytes = window_bytes_;
    evicted = EvictDownTo(Window(options_.eviction_window_bytes));
    evicted_bytes = before_bytes - window_bytes_;
  }
  if (evicted.empty()) return;
  const ScopedRange range(trace(), "pinion.evict", evicted_bytes);
  evicted.clear();
}

void DeviceOffloader::FreeDeviceMemory() {
  FreeUnneeded();
  std::vector<GuardedStorage> evicted;  // let go of after mu_
  MutexLock lock(mu_);
  evicted = EvictDownTo(0);
}

GuardedStorage DeviceOffloader::Evict(Parcel& parcel) {
  LeaveWindow(parcel);
  GuardedStorage evicted(parcel.pack_stream, parcel.copy_out, WaitSite::kEvictAfterCopyOut);
  uint64_t not_freed = 0;
  if (parcel.gathered) evicted.Add(std::exchange(parcel.gathered, c10::Storage()));
  for (StorageRecord* record : parcel.records) {
    if (!record->source) continue;
    // Whoever else owns it frees it later than this wait, so letting go is safe either way.
    if (record->source.use_count() > 1) ++not_freed;
    evicted.Add(std::exchange(record->source, c10::Storage()));
  }
  stats_->Update([&](OffloadStats& stats) {
    stats.evicted_bytes += RecordBytes(parcel);
    stats.evicted_not_freed += not_freed;
  });
  return evicted;
}

// ------------------------------------------------------------------------------------- release

void DeviceOffloader::Release(Handle& handle) {
  StorageRecord& record = *handle.record();
  const int64_t backward = CurrentBackward();
  Released released;
  stats_->Update([](OffloadStats& stats) { --stats.live_handles; });
  MutexLock lock(mu_);
  const ParcelPtr parcel = record.parcel;
  if (parcel != nullptr) {
    --parcel->live_handles;
    if (handle.read_epoch == parcel->epoch) --parcel->read_handles;
  }
  if (--record.live_handles == 0) Forget(record, backward, released);
  if (parcel == nullptr) return;
  if (parcel->live_handles == 0) {
    order_.erase(parcel->OrderKey());
    LeaveWindow(*parcel);
    if (parcel->gathered) {
      LetGo(GuardedStorage(std::exchange(parcel->gathered, c10::Storage()), parcel->pack_stream,
                           parcel->copy_out, WaitSite::kFreeAfterCopy),
            parcel->size_bytes(), backward, released);
    }
  }
  if (!parcel->fetching && parcel->read_handles == parcel->live_handles) {
    released.storages.push_back(TakeFetched(*parcel));
  }
}

// Its last handle is gone.
void DeviceOffloader::Forget(StorageRecord& record, int64_t backward, Released& released) {
  // The handle that goes still shares the record: nothing is let go of under mu_.
  if (record.IsAwaited()) RemovePending(record);
  const auto found = by_storage_.find(record.identity._unsafe_get_target());
  std::erase(found->second.records, &record);
  Transfer copy_out;
  if (record.parcel != nullptr) {
    copy_out = record.parcel->copy_out;
    std::erase(record.parcel->records, &record);
    StopHolding(record, found->second);
  }
  if (found->second.records.empty()) by_storage_.erase(found);
  if (!record.source) return;
  GuardedStorage source(std::exchange(record.source, c10::Storage()), record.pack_stream, copy_out,
                        WaitSite::kFreeAfterCopy);
  const bool copied = record.parcel != nullptr;
  LetGo(std::move(source), copied ? record.storage_bytes : 0, backward, released);
}

void DeviceOffloader::LetGo(GuardedStorage source, uint64_t size_bytes, int64_t backward,
                            Released& released) {
  // Only what EndBackward will be called for, and what no other record could be found to have.
  const bool later = size_bytes > 0 && backward != -1 && backwards_.contains(backward) &&
                     !by_storage_.contains(source.storage().unsafeGetStorageImpl());
  if (!later) {
    released.storages.push_back(std::move(source));
    return;
  }
  late_.push_back(std::move(source));
  late_bytes_ += size_bytes;
  if (late_bytes_ > Window(options_.eviction_window_bytes) / 2) TakeLate(released);
}

void DeviceOffloader::TakeLate(Released& released) {
  std::vector<GuardedStorage> merged;
  for (GuardedStorage& source : std::exchange(late_, {})) {
    if (!merged.empty() && merged.back().stream().torch == source.stream().torch) {
      merged.back().Add(std::move(source));  // the later of the two copies covers both
    } else {
      merged.push_back(std::move(source));
    }
  }
  for (GuardedStorage& source : merged) released.storages.push_back(std::move(source));
  late_bytes_ = 0;
}

}  // namespace pinion
