// The device memory that was saved of a record, as long as it is the record's: whether its copy out
// may begin, and for which operators it waits.
//
//   leaving.Await(node);                                        // its operator may still write it
//   if (leaving.ForgetReturned(now)) leaving.WaitForCompany();  // at the thread's node `now`
//   leaving.Decide();                                           // its copy out is about to begin
//
// Thread safety: none; kRecordsLock guards it.
// Ownership: it has a reference to the storage until that is taken from it.

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

  // Null once the copy out is submitted, as the parcel holds it from then on, or once it was let go
  // of, to be cast again.
  const c10::Storage& source() const { return source_; }
  c10::Storage TakeSource() { return std::exchange(source_, c10::Storage()); }
  // Of the device, that its copy out lets go of: all of the storage for the first record of it.
  uint64_t pending_bytes() const { return pending_bytes_; }
  void set_pending_bytes(uint64_t pending_bytes) { pending_bytes_ = pending_bytes; }

  // --- how far it is ---

  bool IsInUse() const { return copy_out_ == CopyOut::kInUse; }
  bool IsPending() const { return copy_out_ == CopyOut::kPending; }
  // Its copy has not begun, and it has a place in its scope.
  bool IsAwaited() const { return IsInUse() || IsPending(); }
  // The schedule keeps it on the device, as things stand.
  bool Stays() const { return copy_out_ == CopyOut::kStays; }

  void Await(const NodeId& saver) {
    copy_out_ = CopyOut::kInUse;
    savers_.push_back(saver);
  }
  void WaitForCompany() { copy_out_ = CopyOut::kPending; }
  // If someone else holds it once its operator has returned: a copy would free nothing.
  void StayIfHeld() { stays_if_held_ = true; }
  bool IsKeptByHolder() const { return stays_if_held_ && source_.use_count() > 1; }
  void Stay() { copy_out_ = CopyOut::kStays; }
  // The copy out was submitted or soon will be, or there is none: the source stays on the device,
  // or is let go of.
  void Decide() { copy_out_ = CopyOut::kDecided; }

  // --- by whom it was saved ---

  // An operator more has saved it, in its own scope or `elsewhere`.
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
  // Whether none of these operators writes it any more, now that `node` has begun.
  bool HaveSaversReturned(const NodeId& node) const {
    return std::all_of(savers_.begin(), savers_.end(),
                       [&](const NodeId& saver) { return HasReturned(saver, node); });
  }
  // The same; those that do not are forgotten.
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
  // While kInUse those that may still run, while kStays all.
  absl::InlinedVector<NodeId, 1> savers_;
  bool saved_elsewhere_ = false;
  bool stays_if_held_ = false;
  uint64_t pending_bytes_ = 0;
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_LEAVING_MEMORY_H_
