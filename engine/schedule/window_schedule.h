// Runs without plans, by two windows of bytes.
//
// Backward reads a scope from its end, so what comes before the tensor that was just read is
// fetched next, newest first. The order is fixed: the reverse of saving
// (docs/maintainers/decisions/0002).
//
// Device memory that several parcels share counts once: for the parcel that was offloaded last,
// since evictions keep the order.
//
// Thread safety: none.

#ifndef PINION_ENGINE_SCHEDULE_WINDOW_SCHEDULE_H_
#define PINION_ENGINE_SCHEDULE_WINDOW_SCHEDULE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "pinion/engine/schedule/back_off.h"
#include "pinion/engine/schedule/offload_schedule.h"

namespace pinion {

// Sizes of the tensors that were saved in a scope.
class ScopeSizes {
 public:
  // Number of tensors of a scope that may be larger than the usual size.
  static constexpr size_t kOutliers = 3;

  // Returns false if usual_bytes() did not change.
  bool Add(uint64_t size_bytes);

  uint64_t total_bytes() const { return total_bytes_; }
  // Size of the largest tensor that is no outlier; of the smallest one if there are too few.
  uint64_t usual_bytes() const;

 private:
  uint64_t total_bytes_ = 0;
  std::array<uint64_t, kOutliers + 1> largest_{};  // descending; 0: fewer were saved
};

// Size of an automatic window, for a scope that has saved `now`, after one that saved `last`.
//
// The window holds two tensors of the usual size, so that one is copied while the next is computed.
// It is at least a sixteenth of what the last scope saved. In small scopes it is a sixth, up to 64
// KiB, so that small tensors form batches. Outliers, such as the logits of a language model, do not
// enlarge it: each counts as half a window.
uint64_t AutoWindowBytes(const ScopeSizes& now, const ScopeSizes& last);

struct WindowOptions {
  static constexpr uint64_t kAuto = UINT64_MAX;  // from what scopes save (AutoWindowBytes)

  static constexpr uint64_t kNoTensors = UINT64_MAX;

  uint64_t eviction_bytes = kAuto;  // device memory of offloaded parcels
  // Instead of eviction_bytes: how many tensors may be saved after an offloaded one before its
  // eviction.
  uint64_t eviction_tensors = kNoTensors;
  uint64_t prefetch_bytes = kAuto;  // parcels that were prefetched and not read
  uint64_t full_batch_bytes = 0;    // size of a batch that fills the link (packing.h)
};

class WindowSchedule final : public OffloadSchedule {
 public:
  explicit WindowSchedule(const WindowOptions& options) : options_(options) {}

  SaveDecision OnSaved(ScopeId scope, const SavedObject& saved) override;
  void OnScopeEnd(ScopeId scope) override;
  void OnLeft(ScheduledParcel& parcel, absl::Span<const HeldBytes> held) override;
  void OnSavedAgain(ScheduledParcel& parcel, const SavedPlace& place) override;
  void OnPieceGone(ScheduledParcel& parcel, const void* owner) override;
  bool OnGone(ScheduledParcel& parcel) override;
  void OnBackwardBegin(int64_t backward) override;
  void OnBackwardEnd(int64_t backward) override { cursors_.erase(backward); }
  void OnFetched(ScheduledParcel& parcel, int64_t backward) override;
  bool OnRead(ScheduledParcel& parcel) override { return OnDropped(parcel); }
  bool OnDropped(ScheduledParcel& parcel) override;
  void OnFetchesMade(bool room_was_made) override {
    room_was_made ? back_off_.Refused() : back_off_.Worked();
  }
  void OnFetchesRefused(absl::Span<ScheduledParcel* const> parcels) override;
  void OnRoomWanted() override;

  // A batch that is not submitted is not in the window. A window of tensors has no batches.
  uint64_t BatchBytes() const override {
    return options_.eviction_tensors == WindowOptions::kNoTensors ? FullBatchBytes() : 0;
  }
  uint64_t LateBytes() const override { return Window(options_.eviction_bytes) / 2; }
  ScheduledParcels TakeEvictions() override;
  ScheduledParcels TakeAllEvictions() override { return TakeDownTo(0); }
  Fetches TakeFetches(const SavedPlace& from, int64_t backward,
                      absl::FunctionRef<bool(const ScheduledParcel&)> is_away) override;
  std::vector<ScheduledParcel*> FetchedAhead() const override;
  std::vector<ScheduledParcel*> FetchedIn(int64_t backward) const override;

  // For a window of tensors: how many were saved so far; SavedPlace::sequence counts them.
  void OnSaves(uint64_t saves) { saves_ = saves; }

  // --- for a schedule with limits of its own ---

  uint64_t window_bytes() const { return window_bytes_; }
  // The same without that parcel.
  uint64_t WindowBytesWithout(const ScheduledParcel* parcel) const {
    const bool is_in = parcel != nullptr && parcel->scheduled.in_window;
    return window_bytes_ - (is_in ? parcel->scheduled.window_bytes : 0);
  }
  // Evicts the oldest parcels until at most `limit_bytes` are left, but never `kept`.
  ScheduledParcels TakeDownTo(uint64_t limit_bytes, const ScheduledParcel* kept = nullptr);
  // Removes the parcel from the window. Returns whether it was in the window.
  bool Take(ScheduledParcel& parcel);
  // False for some calls after a refused fetch.
  bool MayFetch() { return back_off_.MayTry(); }
  // The parcel counts as prefetched from now on.
  void TakeFetch(ScheduledParcel& parcel);

 private:
  // Where a backward continues to prefetch. The scope's parcels from `oldest` to before `newest`
  // were examined.
  struct Cursor {
    ScopeId scope = 0;  // no scope's number
    uint64_t oldest = 0;
    uint64_t newest = 0;
  };

  void SetAutoBytes();
  uint64_t FullBatchBytes() const;
  // Evicts by a window of tensors.
  ScheduledParcels TakeOld();
  uint64_t Window(uint64_t option) const {
    return option == WindowOptions::kAuto ? auto_bytes_ : option;
  }
  // What `size_bytes` of one parcel count in that window.
  uint64_t ShareOfWindow(uint64_t option, uint64_t size_bytes) const;
  void EnterWindow(ScheduledParcel& parcel);
  void LeaveWindow(ScheduledParcel& parcel);
  void SetHeldBytes(ScheduledParcel& parcel, uint64_t held_bytes);
  void StopHolding(ScheduledParcel& parcel, const HeldBytes& memory);

  const WindowOptions options_;
  std::map<ScopeId, ScopeSizes> scopes_;  // scopes that have not ended
  ScopeSizes last_scope_;
  uint64_t auto_bytes_ = 0;  // the value of kAuto
  absl::btree_map<SavedPlace, ScheduledParcel*> order_;
  ScheduledParcel* oldest_ = nullptr;  // of the window, a list in the order of offloads
  ScheduledParcel* newest_ = nullptr;
  uint64_t window_bytes_ = 0;
  uint64_t saves_ = 0;
  // Parcels of the window by their device memory. It counts for the last of each list.
  absl::flat_hash_map<const void*, absl::InlinedVector<ScheduledParcel*, 1>> holders_;
  uint64_t ahead_bytes_ = 0;
  BackOff back_off_;  // in unpacks
  // By backward; -1 for reads outside of one.
  absl::flat_hash_map<int64_t, Cursor> cursors_;
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_WINDOW_SCHEDULE_H_
