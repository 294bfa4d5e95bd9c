// A schedule by windows of bytes: a parcel is evicted once a window of others has left after it,
// and fetched when those that were saved after it, within a window of bytes, have been read. The
// former window may be one of tensors in place of bytes.
//
// Backward reads a scope from its end, so what comes before the tensor that was just read is
// fetched next, newest first. The order is not asked for: it is the reverse of saving
// (docs/decisions/0005).
//
// What is held counts once, for the parcel that lets go of it: where parcels hold the same memory,
// that is the one that left last, since they are evicted in their order.
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

// How large the automatic windows are, from what scopes saved. Pure functions.
//
// A window holds two tensors of the usual size, so that one can be copied while the next is
// computed, or a sixteenth of what a scope saves, if that is more; of a small scope a sixth, up to
// 64 KiB, so that small tensors travel in company. The few that are larger than all
// others (the logits of a language model) do not make it larger: each counts as half of it, so that
// two of them fit, stays until so much more was saved, and goes.
// What was saved in a scope.
class ScopeSizes {
 public:
  // So many tensors of a scope may be larger than the usual size.
  static constexpr size_t kOutliers = 3;

  // False: usual_bytes() is as before.
  bool Add(uint64_t size_bytes);

  uint64_t total_bytes() const { return total_bytes_; }
  // Of the largest tensor but for the outliers; of the smallest one where there are no more.
  uint64_t usual_bytes() const;

 private:
  uint64_t total_bytes_ = 0;
  std::array<uint64_t, kOutliers + 1> largest_{};  // falling; 0: fewer were saved
};

// Of a scope that has saved `now`, after one that saved `last`.
uint64_t AutoWindowBytes(const ScopeSizes& now, const ScopeSizes& last);

struct WindowOptions {
  static constexpr uint64_t kAuto = UINT64_MAX;  // by what scopes save (AutoWindowBytes)

  static constexpr uint64_t kNoTensors = UINT64_MAX;

  uint64_t eviction_bytes = kAuto;  // of device memory that is held
  // In place of these bytes: how many tensors may be saved after one whose device memory is held.
  uint64_t eviction_tensors = kNoTensors;
  uint64_t prefetch_bytes = kAuto;  // of parcels that were fetched ahead and not read
  uint64_t full_batch_bytes = 0;    // a batch of so many bytes fills the link (packing.h)
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

  // What waits for company is not in the window yet: nothing does in one of tensors.
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

  // With a window of tensors: so many were saved, of which places (SavedPlace::sequence) are
  // numbers.
  void OnSaves(uint64_t saves) { saves_ = saves; }

  // --- for a schedule that has limits of its own ---

  uint64_t window_bytes() const { return window_bytes_; }
  // Without that parcel's, if it is in the window.
  uint64_t WindowBytesWithout(const ScheduledParcel* parcel) const {
    const bool is_in = parcel != nullptr && parcel->scheduled.in_window;
    return window_bytes_ - (is_in ? parcel->scheduled.window_bytes : 0);
  }
  // The oldest, until at most so much is left. Never `kept`.
  ScheduledParcels TakeDownTo(uint64_t limit_bytes, const ScheduledParcel* kept = nullptr);
  // Whether it was in the window, which it leaves.
  bool Take(ScheduledParcel& parcel);
  // Not for a while after fetches were refused; each call counts.
  bool MayFetch() { return back_off_.MayTry(); }
  // It counts as fetched ahead from now on.
  void TakeFetch(ScheduledParcel& parcel);

 private:
  // Where a backward's prefetching goes on: of the scope's parcels, those from `oldest` up to what
  // comes before `newest` have been looked at.
  struct Cursor {
    ScopeId scope = 0;  // no scope's number
    uint64_t oldest = 0;
    uint64_t newest = 0;
  };

  void SetAutoBytes();
  uint64_t FullBatchBytes() const;
  // Those that were saved too long ago for a window of tensors.
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
  std::map<ScopeId, ScopeSizes> scopes_;  // those that have not ended
  ScopeSizes last_scope_;
  uint64_t auto_bytes_ = 0;  // what kAuto stands for, by what the scopes have saved
  absl::btree_map<SavedPlace, ScheduledParcel*> order_;
  ScheduledParcel* oldest_ = nullptr;  // of the window, which is a list in the order of leaving
  ScheduledParcel* newest_ = nullptr;
  uint64_t window_bytes_ = 0;
  uint64_t saves_ = 0;
  // Parcels of the window by the memory that they hold. It counts for the last of each.
  absl::flat_hash_map<const void*, absl::InlinedVector<ScheduledParcel*, 1>> holders_;
  uint64_t ahead_bytes_ = 0;
  BackOff back_off_;  // in unpacks
  // Of backwards that run, and -1 for whoever reads outside of one.
  absl::flat_hash_map<int64_t, Cursor> cursors_;
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_WINDOW_SCHEDULE_H_
