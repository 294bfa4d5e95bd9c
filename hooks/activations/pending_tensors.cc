#include "pinion/hooks/activations/pending_tensors.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace pinion {

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
  const bool all = !company_ || scope.small_bytes >= batch_bytes;
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
  record->leaving.WaitForCompany();
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

}  // namespace pinion
