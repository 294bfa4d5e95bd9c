#include "pinion/hooks/activations/offload_state.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

#include "pinion/engine/link/packing.h"
#include "pinion/engine/schedule/offload_schedule.h"
#include "pinion/hooks/activations/pack_scope.h"
#include "pinion/hooks/activations/storage_record.h"

namespace pinion {
namespace {

WindowOptions WindowsOf(const OffloadOptions& options, const LinkCalibration& link) {
  static_assert(OffloadOptions::kAutoWindow == WindowOptions::kAuto);
  static_assert(OffloadOptions::kNoTensorWindow == WindowOptions::kNoTensors);
  return {.eviction_bytes = options.eviction_window_bytes,
          .eviction_tensors = options.eviction_window_tensors,
          .prefetch_bytes = options.prefetch_window_bytes,
          .full_batch_bytes = FullBatchBytes(link)};
}

}  // namespace

ChosenSchedule ScheduleFor(const OffloadOptions& options, const LinkCalibration& link) {
  const WindowOptions windows = WindowsOf(options, link);
  const uint64_t target_bytes = options.memory_target_bytes;
  if (target_bytes == OffloadOptions::kNoTarget) {
    return {.schedule = std::make_unique<OffloadSchedule>(windows)};
  }
  TargetOptions target = {.windows = windows, .link = link};
  if (target_bytes != OffloadOptions::kAutoTarget) target.memory_bytes = target_bytes;
  auto schedule = std::make_unique<PlannedSchedule>(target);
  PlannedSchedule* const by_plans = schedule.get();
  return {.schedule = std::move(schedule), .target = by_plans};
}

// --- PendingTensors ---

RecordPtrs PendingTensors::TakeDue(ScopeId id, const NodeId& node, uint64_t batch_bytes) {
  Scope& scope = scopes_[id];
  size_t in_use = 0;
  for (RecordPtr& earlier : scope.in_use) {
    if (earlier->leaving.ForgetReturned(node)) {
      EndOperator(scope, std::move(earlier));
    } else {
      std::swap(scope.in_use[in_use++], earlier);
    }
  }
  scope.in_use.resize(in_use);
  const bool all = !batches_tensors_ || scope.small_bytes >= batch_bytes;
  return Take(scope, all || scope.large_bytes >= batch_bytes, all);
}

void PendingTensors::Add(const RecordPtr& record, const NodeId& node) {
  record->leaving.Await(node);
  scopes_[record->scope].in_use.push_back(record);
}

void PendingTensors::AwaitOperator(const RecordPtr& record, const NodeId& node) {
  if (record->leaving.IsPending()) {
    Remove(*record);
    Add(record, node);
  } else {
    record->leaving.NoteSaver(node, /*elsewhere=*/false);
  }
}

RecordPtrs PendingTensors::TakeSavedBy(const NodeId& node) {
  RecordPtrs taken;
  for (auto& [id, scope] : scopes_) {
    std::erase_if(scope.in_use,
                  [&](const RecordPtr& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
                    if (!record->leaving.IsSavedBy(node)) return false;
                    record->leaving.Decide();
                    taken.push_back(record);
                    return true;
                  });
  }
  return taken;
}

void PendingTensors::EndOperator(Scope& scope, RecordPtr record) {
  record->leaving.WaitForBatch();
  const bool small = IsSmall(*record);
  (small ? scope.small_bytes : scope.large_bytes) += record->leaving.pending_bytes();
  (small ? scope.small : scope.large).push_back(std::move(record));
}

void PendingTensors::Remove(const StorageRecord& record) {
  Scope& scope = scopes_.at(record.scope);
  const auto is_record = [&](const RecordPtr& pending) { return pending.get() == &record; };
  if (record.leaving.IsInUse()) {
    std::erase_if(scope.in_use, is_record);
    return;
  }
  const bool small = IsSmall(record);
  RecordPtrs& waiting = small ? scope.small : scope.large;
  waiting.erase(std::find_if(waiting.begin(), waiting.end(), is_record));
  (small ? scope.small_bytes : scope.large_bytes) -= record.leaving.pending_bytes();
}

RecordPtrs PendingTensors::EndScope(ScopeId scope) {
  const auto found = scopes_.find(scope);
  if (found == scopes_.end()) return {};  // the scope saved nothing on this device
  for (RecordPtr& saved : std::exchange(found->second.in_use, {})) {
    EndOperator(found->second, std::move(saved));
  }
  RecordPtrs due = Take(found->second, /*large=*/true, /*small=*/true);
  scopes_.erase(found);
  return due;
}

RecordPtrs PendingTensors::Take(Scope& scope, bool large, bool small) {
  RecordPtrs due;
  if (large) {
    due.swap(scope.large);
    scope.large_bytes = 0;
  }
  if (small) {
    due.insert(due.end(), std::move_iterator(scope.small.begin()),
               std::move_iterator(scope.small.end()));
    scope.small.clear();
    scope.small_bytes = 0;
  }
  // Records are evicted in the order of packing.
  std::sort(due.begin(), due.end(),
            [](const RecordPtr& a, const RecordPtr& b) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
              return a->in_schedule.sequence < b->in_schedule.sequence;
            });
  for (const RecordPtr& record : due) record->leaving.Decide();
  return due;
}

// --- SavedStorages ---

RecordPtr SavedStorages::Find(const c10::Storage& storage, const SavedVersion& version,
                              const StorageExtent& extent) const {
  const auto found = records_.find(storage.unsafeGetStorageImpl());
  if (found == records_.end()) return nullptr;
  // Newest first: an overlapping record of another version or counter shows that the bytes may have
  // changed.
  for (auto it = found->second.rbegin(); it != found->second.rend(); ++it) {
    StorageRecord& record = **it;
    if (record.extent.end_bytes <= extent.begin_bytes ||
        extent.end_bytes <= record.extent.begin_bytes) {
      continue;
    }
    if (record.version != version || !record.HasItsMemory(storage)) return nullptr;
    if (record.extent.begin_bytes <= extent.begin_bytes &&
        extent.end_bytes <= record.extent.end_bytes) {
      return record.shared_from_this();
    }
  }
  return nullptr;
}

RecordPtrs SavedStorages::All() const {
  RecordPtrs found;
  for (const auto& [storage, records] : records_) {
    for (StorageRecord* record : records) found.push_back(record->shared_from_this());
  }
  std::sort(found.begin(), found.end(),
            [](const RecordPtr& a, const RecordPtr& b) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock) {
              return a->in_schedule.sequence < b->in_schedule.sequence;
            });
  return found;
}

void SavedStorages::NoteStays(StorageRecord& record) {
  record.leaving.Stay();
  staying_[record.in_schedule.object] = &record;
}

RecordPtr SavedStorages::TakeStaying(uint32_t object) {
  const auto found = staying_.find(object);
  if (found == staying_.end()) return nullptr;
  StorageRecord& record = *found->second;
  staying_.erase(found);
  return record.shared_from_this();
}

void SavedStorages::Add(StorageRecord& record) {
  auto& records = records_[record.storage()];
  record.leaving.set_pending_bytes(records.empty() ? record.storage_bytes : record.size_bytes());
  records.push_back(&record);
}

void SavedStorages::Remove(const StorageRecord& record) {
  const auto found = records_.find(record.storage());
  auto& records = found->second;
  records.erase(std::find(records.begin(), records.end(), &record));
  if (records.empty()) records_.erase(found);
  if (record.Stays()) staying_.erase(record.in_schedule.object);
}

void AppendLiveOf(OffloadState& state, c10::Device device, std::vector<LiveTensor>& tensors) {
  RecordPtrs records;
  const size_t first = tensors.size();
  {
    OffloadLock lock(state);
    records = state.books.storages.All();
    for (const RecordPtr& record : records) {
      LiveTensor& tensor = tensors.emplace_back();
      tensor.saved_tensors = record->live_handles;
      tensor.on_device = record->IsOnDevice();
      tensor.in_host_memory = record->in_parcel.parcel() != nullptr;
    }
  }
  for (size_t i = 0; i < records.size(); ++i) {
    const StorageRecord& record = *records[i];
    LiveTensor& tensor = tensors[first + i];
    tensor.tensor = record.origin.view().Describe();
    tensor.made_by = record.origin.MadeBy();
    tensor.node = record.origin.node();
    tensor.scope = record.scope;
    tensor.scopes_ago = LastScopeId() - record.scope;
    tensor.device_index = device.index();
    tensor.size_bytes = record.size_bytes();
  }
}

}  // namespace pinion
