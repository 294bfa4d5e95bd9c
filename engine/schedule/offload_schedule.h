// Decides which parcels are offloaded and fetched, and when. Others execute the decisions.
//
//   schedule.OnSaved(scope, {bytes, signature}).leaves            // is this tensor offloaded?
//   schedule.OnLeft(parcel, held);                                // a copy out was submitted
//   for (ScheduledParcel* parcel : schedule.TakeEvictions()) ...  // free their device memory
//   schedule.OnRead(parcel);                                      // backward has read it
//   for (ScheduledParcel* parcel : schedule.TakeFetches(...).parcels) ...  // copy them in
//
// A schedule knows parcels by numbers: when they were saved, how large they are, and which device
// memory their eviction frees. It knows no device, no clock and no lock. WindowSchedule
// (window_schedule.h) decides by windows of bytes, PlannedSchedule (planned_schedule.h) by plans.
//
// Thread safety: none. The owner's lock guards the schedule and the fields of its parcels.
// Ownership: a parcel belongs to its tenant, and has to live from OnLeft to OnGone.

#ifndef PINION_ENGINE_SCHEDULE_OFFLOAD_SCHEDULE_H_
#define PINION_ENGINE_SCHEDULE_OFFLOAD_SCHEDULE_H_

#include <compare>
#include <cstdint>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/types/span.h"

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

class OffloadSchedule {
 public:
  struct Fetches {
    ScheduledParcels parcels;  // one batch, of one stream
    uint64_t looks = 0;        // parcels that were examined
    bool is_all = false;       // asking again would return none
  };

  virtual ~OffloadSchedule() = default;

  // --- events ---

  // Bytes that LibTorch's allocator has given out, and those of streamed weights among them
  // (device_share.h). If AsksForDeviceBytes, call it before asking for deferred offloads, evictions
  // or fetches.
  virtual bool AsksForDeviceBytes() const { return false; }
  virtual void OnDeviceBytes(uint64_t /*size_bytes*/, uint64_t /*streamed_bytes*/) {}

  // A tensor was saved.
  virtual SaveDecision OnSaved(ScopeId scope, const SavedObject& saved) = 0;
  // An object is accessed. Ask for deferred offloads and evictions before anything is allocated.
  virtual void OnUsed(uint32_t /*object*/, AccessKind /*access*/) {}
  // The object was accessed, and its reader is about to recast it.
  virtual void OnRecast(uint32_t /*object*/) {}
  // The object is no longer needed.
  virtual void OnReleased(uint32_t /*object*/) {}
  // Nothing more is saved in the scope. All its tensors were offloaded, stay resident, or are
  // deferred (TakeDeferredOffloads).
  virtual void OnScopeEnd(ScopeId scope) = 0;
  // The copy out of the parcel was submitted. Evicting it frees `held`, one entry per piece.
  virtual void OnLeft(ScheduledParcel& parcel, absl::Span<const HeldBytes> held) = 0;
  // A tensor in the parcel was saved again, in `place`.
  virtual void OnSavedAgain(ScheduledParcel& parcel, const SavedPlace& place) = 0;
  // A piece of the parcel is no longer needed, and no longer references `owner`.
  virtual void OnPieceGone(ScheduledParcel& parcel, const void* owner) = 0;
  // The parcel is no longer needed. Returns true if it was prefetched and never read.
  virtual bool OnGone(ScheduledParcel& parcel) = 0;

  virtual void OnBackwardBegin(int64_t backward) = 0;
  virtual void OnBackwardEnd(int64_t backward) = 0;
  // A copy in was submitted in `backward` (-1: in none), on demand or as a prefetch.
  virtual void OnFetched(ScheduledParcel& parcel, int64_t backward) = 0;
  // A fetched parcel was read. Returns true for the first read of a prefetch.
  virtual bool OnRead(ScheduledParcel& parcel) = 0;
  // Whether the fetched memory stays resident after its present readers, until an eviction frees
  // it.
  virtual bool StaysFetched(const ScheduledParcel& /*parcel*/) const { return false; }
  // Fetched memory was freed. Returns true if it was never read.
  virtual bool OnDropped(ScheduledParcel& parcel) = 0;
  // Fetches that TakeFetches asked for were made, or were refused. `room_was_made`: the device's
  // allocator had to free its cache for them, for which the host waits.
  virtual void OnFetchesMade(bool room_was_made) = 0;
  virtual void OnFetchesRefused(absl::Span<ScheduledParcel* const> parcels) = 0;
  // Prefetched memory was freed unread. It may be fetched again.
  virtual void OnRoomWanted() = 0;

  // --- decisions ---

  // A batch of offloads is submitted once it holds this much device memory.
  virtual uint64_t BatchBytes() const = 0;
  // Released device memory whose copy out is pending is freed once it amounts to this much.
  virtual uint64_t LateBytes() const = 0;
  // Objects with the same key may share a parcel or a batch. A parcel is evicted and fetched as a
  // whole, and a batch completes as a whole. Asked when the object is about to be offloaded.
  virtual uint64_t BatchKey(uint32_t /*object*/) const { return 0; }
  // Objects that were to stay resident and have to be offloaded now, in the order of submission,
  // after all pending ones.
  virtual std::vector<uint32_t> TakeDeferredOffloads() { return {}; }
  // Parcels to evict: those in excess, or all whose eviction frees memory. An evicted parcel that
  // was fetched can be evicted again: the fetched memory is freed. Ask again, with the device's new
  // bytes, until there are none.
  virtual ScheduledParcels TakeEvictions() = 0;
  virtual ScheduledParcels TakeAllEvictions() = 0;
  // Parcels to prefetch, when the tensor saved at `from` is read in `backward`. They count as
  // prefetched from now on. `is_away` tells whether a fetch would copy anything.
  virtual Fetches TakeFetches(const SavedPlace& from, int64_t backward,
                              absl::FunctionRef<bool(const ScheduledParcel&)> is_away) = 0;
  // Parcels that were prefetched and not read, or that stay for a later reader. Parcels that were
  // fetched in `backward`, and are useless after it.
  virtual std::vector<ScheduledParcel*> FetchedAhead() const = 0;
  virtual std::vector<ScheduledParcel*> FetchedIn(int64_t backward) const = 0;
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_OFFLOAD_SCHEDULE_H_
