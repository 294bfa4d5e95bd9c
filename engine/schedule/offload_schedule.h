// Decides which parcels are offloaded and fetched, and when. Others execute the decisions.
//
//   OffloadSchedule schedule({.full_batch_bytes = FullBatchBytes(link)});
//   schedule.OnSaved(scope, {bytes, signature}).leaves            // is this tensor offloaded?
//   schedule.OnLeft(parcel, held);                                // a copy out was submitted
//   for (ScheduledParcel* parcel : schedule.TakeEvictions()) ...  // free their device memory
//   schedule.OnRead(parcel);                                      // backward has read it
//   for (ScheduledParcel* parcel : schedule.TakeFetches(...).parcels) ...  // copy them in
//
// A schedule knows parcels by numbers: when they were saved, how large they are, and which device
// memory their eviction frees. It knows no device, no clock and no lock.
//
// It runs by two windows of bytes. Backward reads a scope from its end, so what comes before the
// tensor that was just read is fetched next, newest first. The order is fixed: the reverse of
// saving (docs/maintainers/decisions/0002). Device memory that several parcels share counts once:
// for the parcel that was offloaded last, since evictions keep the order.
//
// PlannedSchedule (planned_schedule.h) overrides the decisions by plans.
//
// Thread safety: none. The owner's lock guards the schedule and the fields of its parcels.
// Ownership: a parcel belongs to its tenant, and has to live from OnLeft to OnGone.

#ifndef PINION_ENGINE_SCHEDULE_OFFLOAD_SCHEDULE_H_
#define PINION_ENGINE_SCHEDULE_OFFLOAD_SCHEDULE_H_

#include <array>
#include <compare>
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

namespace pinion {

// Identifies tensors that are saved together, for example in one forward. From 1, process-wide.
using ScopeId = uint64_t;

// When something was saved. Backward reads a scope from its end.
struct SavedPlace {
  ScopeId scope = 0;  // no scope's number
  uint64_t sequence = 0;

  friend auto operator<=>(const SavedPlace&, const SavedPlace&) = default;
};

// A saved tensor, as schedules know it.
struct SavedObject {
  uint64_t size_bytes = 0;
  uint64_t signature = 0;  // StepObject::signature
};

// How a saved object is accessed.
enum class AccessKind {
  kSaved,          // saved again, by another operator
  kRead,           // about to be read; the last reader releases it
  kReadAndKept,    // about to be read, in a retained graph: not released
  kReadIntoGraph,  // the same, while the backward creates another graph
};

// What the schedule decides for a saved object.
struct SaveDecision {
  uint32_t object = 0;  // the schedule's id of the object, until it is released
  bool leaves = true;   // whether it is offloaded; false: it stays resident, without a copy
  // Offload an autograd leaf even while the program references it: the program is expected to
  // release it.
  bool even_if_held = false;
};

// Device memory that an eviction frees. Several parcels may share it.
struct HeldBytes {
  const void* owner = nullptr;  // which memory
  uint64_t size_bytes = 0;      // all of it
};

// A parcel as schedules know it. Tenants derive their own type.
struct ScheduledParcel {
  SavedPlace place;  // of the tensor in it that was saved last
  uint64_t size_bytes = 0;
  uint64_t stream = 0;  // any number that identifies the stream; fetches are batched by stream
  absl::InlinedVector<uint32_t, 1> objects;  // ids of its objects: SaveDecision::object

  // The schedule's own fields, from OnLeft on.
  struct Scheduled {
    struct Held {
      HeldBytes memory;
      int pieces = 0;  // how many pieces of the parcel lie in it
    };
    bool in_window = false;             // offloaded, and its device memory not yet evicted
    ScheduledParcel* older = nullptr;   // neighbour in the window, offloaded before; may be null
    ScheduledParcel* newer = nullptr;   // neighbour in the window, offloaded after; may be null
    absl::InlinedVector<Held, 1> held;  // while in the window
    uint64_t held_bytes = 0;            // bytes that this parcel counts for
    uint64_t window_bytes = 0;          // what the parcel counts in the window
    bool fetched_ahead = false;         // prefetched and not read yet
    uint64_t ahead_bytes = 0;           // what the parcel counts in the prefetch window
    int64_t fetched_in = -1;            // the backward of the last fetch
  };
  Scheduled scheduled;
};

// A batch of small tensors is one parcel, and so is a large tensor. Most calls return one.
using ScheduledParcels = absl::InlinedVector<ScheduledParcel*, 1>;

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

class OffloadSchedule {
 public:
  struct Fetches {
    ScheduledParcels parcels;  // one batch, of one stream
    uint64_t looks = 0;        // parcels that were examined
    bool is_all = false;       // asking again would return none
  };

  explicit OffloadSchedule(const WindowOptions& options) : options_(options) {}
  virtual ~OffloadSchedule() = default;

  // --- events ---

  // Bytes that LibTorch's allocator has given out, and those of streamed weights among them
  // (device_share.h). If AsksForDeviceBytes, call it before asking for deferred offloads, evictions
  // or fetches.
  virtual bool AsksForDeviceBytes() const { return false; }
  virtual void OnDeviceBytes(uint64_t /*size_bytes*/, uint64_t /*streamed_bytes*/) {}

  // For a window of tensors: how many were saved so far; SavedPlace::sequence counts them.
  void OnSaves(uint64_t saves) { saves_ = saves; }
  // A tensor was saved.
  virtual SaveDecision OnSaved(ScopeId scope, const SavedObject& saved);
  // An object is accessed. Ask for deferred offloads and evictions before anything is allocated.
  virtual void OnUsed(uint32_t /*object*/, AccessKind /*access*/) {}
  // The object was accessed, and its reader is about to recast it.
  virtual void OnRecast(uint32_t /*object*/) {}
  // The object is no longer needed.
  virtual void OnReleased(uint32_t /*object*/) {}
  // Nothing more is saved in the scope. All its tensors were offloaded, stay resident, or are
  // deferred (TakeDeferredOffloads).
  virtual void OnScopeEnd(ScopeId scope);
  // The copy out of the parcel was submitted. Evicting it frees `held`, one entry per piece.
  virtual void OnLeft(ScheduledParcel& parcel, absl::Span<const HeldBytes> held);
  // A tensor in the parcel was saved again, in `place`.
  void OnSavedAgain(ScheduledParcel& parcel, const SavedPlace& place);
  // A piece of the parcel is no longer needed, and no longer references `owner`.
  void OnPieceGone(ScheduledParcel& parcel, const void* owner);
  // The parcel is no longer needed. Returns true if it was prefetched and never read.
  virtual bool OnGone(ScheduledParcel& parcel);

  virtual void OnBackwardBegin(int64_t backward);
  void OnBackwardEnd(int64_t backward) { cursors_.erase(backward); }
  // A copy in was submitted in `backward` (-1: in none), on demand or as a prefetch.
  virtual void OnFetched(ScheduledParcel& parcel, int64_t backward);
  // A fetched parcel was read. Returns true for the first read of a prefetch.
  bool OnRead(ScheduledParcel& parcel) { return StopFetchedAhead(parcel); }
  // Whether the fetched memory stays resident after its present readers, until an eviction frees
  // it.
  virtual bool StaysFetched(const ScheduledParcel& /*parcel*/) const { return false; }
  // Fetched memory was freed. Returns true if it was never read.
  virtual bool OnDropped(ScheduledParcel& parcel) { return StopFetchedAhead(parcel); }
  // Fetches that TakeFetches asked for were made, or were refused. `room_was_made`: the device's
  // allocator had to free its cache for them, for which the host waits.
  void OnFetchesMade(bool room_was_made) {
    room_was_made ? back_off_.Refused() : back_off_.Worked();
  }
  virtual void OnFetchesRefused(absl::Span<ScheduledParcel* const> parcels);
  // Prefetched memory was freed unread. It may be fetched again.
  virtual void OnRoomWanted();

  // --- decisions ---

  // A batch of offloads is submitted once it holds this much device memory. A batch that is not
  // submitted is not in the window. A window of tensors has no batches.
  virtual uint64_t BatchBytes() const {
    return options_.eviction_tensors == WindowOptions::kNoTensors ? FullBatchBytes() : 0;
  }
  // Released device memory whose copy out is pending is freed once it amounts to this much.
  virtual uint64_t LateBytes() const { return Window(options_.eviction_bytes) / 2; }
  // Objects with the same key may share a parcel or a batch. A parcel is evicted and fetched as a
  // whole, and a batch completes as a whole. Asked when the object is about to be offloaded.
  virtual uint64_t BatchKey(uint32_t /*object*/) const { return 0; }
  // Objects that were to stay resident and have to be offloaded now, in the order of submission,
  // after all pending ones.
  virtual std::vector<uint32_t> TakeDeferredOffloads() { return {}; }
  // Parcels to evict: those in excess, or all whose eviction frees memory. An evicted parcel that
  // was fetched can be evicted again: the fetched memory is freed. Ask again, with the device's new
  // bytes, until there are none.
  virtual ScheduledParcels TakeEvictions();
  virtual ScheduledParcels TakeAllEvictions() { return TakeDownTo(0); }
  // Parcels to prefetch, when the tensor saved at `from` is read in `backward`. They count as
  // prefetched from now on. `is_away` tells whether a fetch would copy anything.
  virtual Fetches TakeFetches(const SavedPlace& from, int64_t backward,
                              absl::FunctionRef<bool(const ScheduledParcel&)> is_away);
  // Parcels that were prefetched and not read, or that stay for a later reader. Parcels that were
  // fetched in `backward`, and are useless after it.
  virtual std::vector<ScheduledParcel*> FetchedAhead() const;
  virtual std::vector<ScheduledParcel*> FetchedIn(int64_t backward) const;

 protected:
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

  // Stops counting the parcel as an unread prefetch. Returns whether it was one.
  bool StopFetchedAhead(ScheduledParcel& parcel);
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

#endif  // PINION_ENGINE_SCHEDULE_OFFLOAD_SCHEDULE_H_
