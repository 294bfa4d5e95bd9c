// The device memory of a saved tensor until its copy out is submitted: whether the copy may begin,
// and for which operators it waits.
//
//   leaving.Await(node);                                        // its operator may still write it
//   if (leaving.ForgetReturned(now)) leaving.WaitForCompany();  // at the thread's node `now`
//   leaving.Decide();                                           // its copy out is about to begin
//
// Thread safety: guarded by kRecordsLock.
// Ownership: owns a reference to the storage until TakeSource.

#ifndef PINION_HOOKS_ACTIVATIONS_LEAVING_MEMORY_H_
#define PINION_HOOKS_ACTIVATIONS_LEAVING_MEMORY_H_

#include <c10/core/Storage.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {

class LeavingMemory {
 public:
  explicit LeavingMemory(const c10::Storage& source) : source_(source) {}

  // Returns null once the copy out is submitted (the parcel then owns the memory), or once the
  // tensor was dropped to be recast.
  const c10::Storage& source() const { return source_; }
  c10::Storage TakeSource() { return std::exchange(source_, c10::Storage()); }
  // Device bytes that the copy out makes free: the whole storage for its first record.
  uint64_t pending_bytes() const { return pending_bytes_; }
  void set_pending_bytes(uint64_t pending_bytes) { pending_bytes_ = pending_bytes; }

  // --- state of the copy out ---

  bool IsInUse() const { return copy_out_ == CopyOut::kInUse; }
  bool IsPending() const { return copy_out_ == CopyOut::kPending; }
  // Returns whether the copy has not begun and the record waits for it in its scope.
  bool IsAwaited() const { return IsInUse() || IsPending(); }
  // Returns whether the schedule keeps the record resident at present.
  bool Stays() const { return copy_out_ == CopyOut::kStays; }

  void Await(const NodeId& saver) {
    copy_out_ = CopyOut::kInUse;
    savers_.push_back(saver);
  }
  void WaitForCompany() { copy_out_ = CopyOut::kPending; }
  // Makes the record stay if the program references it after its operator: a copy frees nothing.
  void StayIfHeld() { stays_if_held_ = true; }
  bool IsKeptByHolder() const { return stays_if_held_ && source_.use_count() > 1; }
  void Stay() { copy_out_ = CopyOut::kStays; }
  // The copy out is submitted or soon will be, or there is none: the memory stays on the device or
  // is released.
  void Decide() { copy_out_ = CopyOut::kDecided; }

  // --- operators that have saved it ---

  // Adds an operator that has saved the record, in the record's scope or `elsewhere`.
  void NoteSaver(const NodeId& saver, bool elsewhere) {
    savers_.push_back(saver);
    saved_elsewhere_ = saved_elsewhere_ || elsewhere;
  }
  NodeId TakeLastSaver() {
    const NodeId saver = savers_.back();
    savers_.pop_back();
    return saver;
  }
  bool saved_elsewhere() const { return saved_elsewhere_; }
  bool IsSavedBy(const NodeId& node) const {
    return std::any_of(savers_.begin(), savers_.end(), [&](const NodeId& saver) {
      return saver.thread == node.thread && saver.sequence == node.sequence;
    });
  }
  // Returns whether all these operators have returned when `node` has begun.
  bool HaveSaversReturned(const NodeId& node) const {
    return std::all_of(savers_.begin(), savers_.end(),
                       [&](const NodeId& saver) { return HasReturned(saver, node); });
  }
  // The same, but forgets the operators that have returned.
  bool ForgetReturned(const NodeId& node) {
    savers_.erase(std::remove_if(savers_.begin(), savers_.end(),
                                 [&](const NodeId& saver) { return HasReturned(saver, node); }),
                  savers_.end());
    return savers_.empty();
  }

 private:
  enum class CopyOut { kInUse, kPending, kStays, kDecided };

  c10::Storage source_;
  CopyOut copy_out_ = CopyOut::kInUse;
  // While kInUse, operators that may still run; while kStays, all operators.
  absl::InlinedVector<NodeId, 1> savers_;
  bool saved_elsewhere_ = false;
  bool stays_if_held_ = false;
  uint64_t pending_bytes_ = 0;
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_LEAVING_MEMORY_H_
