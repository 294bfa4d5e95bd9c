// Saved tensors whose copy out has not begun, because their operator may still run or because they
// wait to be batched.
//
// No copy reads a saved tensor before the operator that saved it has returned (HasReturned), which
// is known at the thread's next node or at the end of the scope. A tensor that is too small to fill
// the link then waits until the waiting tensors of its scope hold a full batch of device memory, or
// the scope ends. Small tensors wait in the same way to share a parcel.
//
// Thread safety: the owner's OffloadState lock guards it.

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
  // Tensors up to `largest_small_bytes` are small (packing.h). False `company`: no batching.
  PendingTensors(uint64_t largest_small_bytes, bool company)
      : largest_small_bytes_(largest_small_bytes), company_(company) {}

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
  // TakeDeferredOffloads the caller must check each again, if it still lives.
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
  const bool company_;
  std::map<ScopeId, Scope> scopes_;  // open scopes
  std::vector<std::weak_ptr<StorageRecord>> deferred_offloads_;
  NodeId last_saver_ = {};
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_PENDING_TENSORS_H_
