// Saved tensors that have not left yet: those whose operators may still run, and those that wait
// for company, or for an operator of another scope.
//
// Nothing reads a saved tensor before the operator that saved it has returned (HasReturned): that
// is known at the thread's next node, or at the end of the scope. A tensor that does not fill the
// link by itself then waits until the others hold as much device memory as does, or the scope ends,
// and leaves with them. Small ones wait for each other in the same way, since they share a parcel.
//
// Thread safety: none; whoever calls holds the lock of the OffloadState that it belongs to.

#ifndef PINION_HOOKS_ACTIVATIONS_PENDING_TENSORS_H_
#define PINION_HOOKS_ACTIVATIONS_PENDING_TENSORS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "pinion/engine/schedule/offload_schedule.h"
#include "pinion/hooks/activations/storage_record.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {

class PendingTensors {
 public:
  // Tensors of at most so many bytes are small (packing.h). Without `company` none waits for it.
  PendingTensors(uint64_t largest_small_bytes, bool company)
      : largest_small_bytes_(largest_small_bytes), company_(company) {}

  // `node` is about to save something in the scope; operators that have returned by then have.
  // Returns records that are due: those whose batch holds `batch_bytes`, in the order of packing.
  RecordPtrs TakeDue(ScopeId scope, const NodeId& node, uint64_t batch_bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);

  // `node` has saved something, on any thread: the last one that has.
  void NoteSave(const NodeId& node) { last_saver_ = node; }
  const NodeId& last_saver() const { return last_saver_; }

  // A record that is to leave, saved by `node`.
  void Add(const RecordPtr& record, const NodeId& node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);

  // Whether operators of the scope may still run: something was saved in it, and it has not ended.
  bool IsOpen(ScopeId scope) const { return scopes_.contains(scope); }
  bool IsAnyOpen() const { return !scopes_.empty(); }

  // One more operator has saved the record, which is awaited: nothing is to read it before that
  // one, too, has returned.
  void AwaitOperator(const RecordPtr& record, const NodeId& node)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);

  // What `node`, whose operator has not returned, has saved: it is awaited no more.
  RecordPtrs TakeSavedBy(const NodeId& node) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);

  // The record, which is awaited, is not needed any more.
  void Remove(const StorageRecord& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);

  // The record, which stays, is to leave, and waits for an operator of a later scope that has saved
  // it as well. It is not awaited. Whoever takes all asks anew of each, if it still lives.
  void AddLateLeaver(const RecordPtr& record) { late_leavers_.push_back(record); }
  std::vector<std::weak_ptr<StorageRecord>> TakeLateLeavers() {
    return std::exchange(late_leavers_, {});
  }

  // No operator of the scope runs any more: all that is left of it.
  RecordPtrs EndScope(ScopeId scope) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);

 private:
  struct Scope {
    std::vector<RecordPtr> in_use;  // their operators have not returned, as far as is known
    RecordPtrs large;               // these wait for company
    RecordPtrs small;
    uint64_t large_bytes = 0;
    uint64_t small_bytes = 0;
  };

  bool IsSmall(const StorageRecord& record) const {
    return record.size_bytes() <= largest_small_bytes_;
  }
  void EndOperator(Scope& scope, RecordPtr record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);
  // Large ones do not wait for small ones.
  static RecordPtrs Take(Scope& scope, bool large, bool small)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(kRecordsLock);

  const uint64_t largest_small_bytes_;
  const bool company_;
  std::map<ScopeId, Scope> scopes_;  // that have not ended
  std::vector<std::weak_ptr<StorageRecord>> late_leavers_;
  NodeId last_saver_ = {};
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_PENDING_TENSORS_H_
