// Which parcels leave device memory and which come back, and when: decisions, which others execute.
//
//   schedule.OnSaved(scope, {bytes, signature}).leaves            // one tensor more: does it go?
//   schedule.OnLeft(parcel, held);                                // a copy out was submitted
//   for (ScheduledParcel* parcel : schedule.TakeEvictions()) ...  // drop their device memory
//   schedule.OnRead(parcel);                                      // backward has read it
//   for (ScheduledParcel* parcel : schedule.TakeFetches(...).parcels) ...  // copy them in
//
// A schedule is told what happens and is asked what to do. It knows parcels by numbers: when they
// were saved, how large they are, what device memory their eviction frees. It knows no device, no
// clock and no lock. WindowSchedule (window_schedule.h) goes by windows of bytes, PlannedSchedule
// (planned_schedule.h) by a plan of the step.
//
// Thread safety: none; its owner's lock guards it, and the parcels' fields with it.
// Ownership: a parcel is its tenant's, and outlives the time from OnLeft to OnGone.

#ifndef PINION_ENGINE_SCHEDULE_OFFLOAD_SCHEDULE_H_
#define PINION_ENGINE_SCHEDULE_OFFLOAD_SCHEDULE_H_

#include <compare>
#include <cstdint>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/types/span.h"

namespace pinion {

// Names what was saved together, one forward for example; from 1, process-wide.
using ScopeId = uint64_t;

// When something was saved. Backward reads a scope from its end.
struct SavedPlace {
  ScopeId scope = 0;  // no scope's number
  uint64_t sequence = 0;

  friend auto operator<=>(const SavedPlace&, const SavedPlace&) = default;
};

// A tensor that is saved, to a schedule.
struct SavedObject {
  uint64_t size_bytes = 0;
  uint64_t signature = 0;  // StepObject::signature
};

// Who uses an object that was saved.
enum class AccessKind {
  kSaved,          // once more, by another operator
  kRead,           // its reader is about to, and lets go of it if it is the last one
  kReadAndKept,    // its reader is about to, in a graph that is kept: it is not let go of
  kReadIntoGraph,  // its reader is about to, in a graph that is kept while another one is made
};

// What a schedule makes of it.
struct SaveDecision {
  uint32_t object = 0;  // the schedule's number for it, until nobody needs it any more
  bool leaves = true;   // false: it stays on the device and is not copied
  // A leaf leaves even if the program still holds it: it counts on the program to let go of it.
  bool even_if_held = false;
};

// Device memory that an eviction lets go of. Several parcels may hold the same.
struct HeldBytes {
  const void* owner = nullptr;  // which memory
  uint64_t size_bytes = 0;      // of all of it
};

// A parcel as schedules know it. Tenants derive their own from it.
struct ScheduledParcel {
  SavedPlace place;  // of what was saved last of it
  uint64_t size_bytes = 0;
  uint64_t stream = 0;  // any number by which to tell streams apart: fetches are batched by it
  absl::InlinedVector<uint32_t, 1> objects;  // whose bytes it has: SaveDecision::object

  // The schedule's own, from OnLeft on.
  struct Scheduled {
    struct Held {
      HeldBytes memory;
      int pieces = 0;  // of the parcel, that lie in it
    };
    bool in_window = false;             // it has left, and what it holds was not evicted yet
    ScheduledParcel* older = nullptr;   // of the window: who left just before it; null: nobody
    ScheduledParcel* newer = nullptr;   // of the window: who left just after it; null: nobody
    absl::InlinedVector<Held, 1> held;  // while in the window
    uint64_t held_bytes = 0;            // of it, what counts for this parcel
    uint64_t window_bytes = 0;          // and with how much
    bool fetched_ahead = false;         // and not read yet
    uint64_t ahead_bytes = 0;           // what it counts meanwhile
    int64_t fetched_in = -1;            // by which backward, last
  };
  Scheduled scheduled;
};

// A batch of small tensors is one parcel, and so is a large tensor: most calls return one.
using ScheduledParcels = absl::InlinedVector<ScheduledParcel*, 1>;

class OffloadSchedule {
 public:
  struct Fetches {
    ScheduledParcels parcels;  // one batch, of one stream
    uint64_t looks = 0;        // parcels that were looked at
    bool is_all = false;       // asking again would give none, as things stand
  };

  virtual ~OffloadSchedule() = default;

  // --- what happens ---

  // What LibTorch's allocator has given out, and of that, what weights have that come and go
  // (device_share.h); if AsksForDeviceBytes, before late leavers, evictions or fetches are asked
  // for.
  virtual bool AsksForDeviceBytes() const { return false; }
  virtual void OnDeviceBytes(uint64_t /*size_bytes*/, uint64_t /*visiting_bytes*/) {}

  // One more tensor was saved.
  virtual SaveDecision OnSaved(ScopeId scope, const SavedObject& saved) = 0;
  // Ask for late leavers and for evictions before anything is allocated.
  virtual void OnUsed(uint32_t /*object*/, AccessKind /*access*/) {}
  // It was used, and its reader is about to compute it again.
  virtual void OnRecast(uint32_t /*object*/) {}
  // Nobody needs it any more.
  virtual void OnReleased(uint32_t /*object*/) {}
  // Nothing more is saved in the scope. All that it saved has left, stays for good, or waits for
  // others (TakeDeferredOffloads).
  virtual void OnScopeEnd(ScopeId scope) = 0;
  // The copy out of the parcel was submitted; evicting it lets go of `held`, one entry for each of
  // its pieces.
  virtual void OnLeft(ScheduledParcel& parcel, absl::Span<const HeldBytes> held) = 0;
  // Something in it was saved once more, in `place`.
  virtual void OnSavedAgain(ScheduledParcel& parcel, const SavedPlace& place) = 0;
  // One of its pieces is not needed any more, and does not hold `owner` any longer.
  virtual void OnPieceGone(ScheduledParcel& parcel, const void* owner) = 0;
  // Nobody needs the parcel. True if it was fetched ahead for nothing.
  virtual bool OnGone(ScheduledParcel& parcel) = 0;

  virtual void OnBackwardBegin(int64_t backward) = 0;
  virtual void OnBackwardEnd(int64_t backward) = 0;
  // A copy in, on demand or ahead, was submitted in `backward` (-1: in none).
  virtual void OnFetched(ScheduledParcel& parcel, int64_t backward) = 0;
  // Somebody has read the parcel, which was fetched. True if it was fetched ahead, the first time.
  virtual bool OnRead(ScheduledParcel& parcel) = 0;
  // Whether what was fetched of it stays once the reader who uses it now, and all others, have read
  // it: it is let go of by an eviction then.
  virtual bool StaysFetched(const ScheduledParcel& /*parcel*/) const { return false; }
  // What was fetched was let go of. True if nobody had read it.
  virtual bool OnDropped(ScheduledParcel& parcel) = 0;
  // Fetches that TakeFetches asked for were made, or could not be. `room_was_made`: the device's
  // allocator had to give its cache back for them, for which the host waits.
  virtual void OnFetchesMade(bool room_was_made) = 0;
  virtual void OnFetchesRefused(absl::Span<ScheduledParcel* const> parcels) = 0;
  // What was fetched ahead was dropped unread, to make room: it may be asked for again.
  virtual void OnRoomWanted() = 0;

  // --- what to do ---

  // What waits for company leaves once it holds so much device memory.
  virtual uint64_t BatchBytes() const = 0;
  // Memory that nobody needs any more but for its copy out goes once it is so much.
  virtual uint64_t LateBytes() const = 0;
  // What shares a parcel goes and comes back together, and what leaves together has left when all
  // of it has: only what has the same company may do either. Asked for when the object is about to
  // leave.
  virtual uint64_t BatchKey(uint32_t /*object*/) const { return 0; }
  // Objects that were to stay, and are to leave now or have to after all, in the order in which
  // they leave: behind those that are about to by themselves.
  virtual std::vector<uint32_t> TakeDeferredOffloads() { return {}; }
  // Parcels to evict: those that are in excess, or all that can free anything. One that was evicted
  // before and has come back goes once more: what was fetched is dropped. Ask again, with what the
  // device has then, until there are none.
  virtual ScheduledParcels TakeEvictions() = 0;
  virtual ScheduledParcels TakeAllEvictions() = 0;
  // Parcels to fetch ahead, now that what was saved at `from` is read in `backward`; they count as
  // fetched ahead from now on. `is_away` tells whether a fetch would bring anything back.
  virtual Fetches TakeFetches(const SavedPlace& from, int64_t backward,
                              absl::FunctionRef<bool(const ScheduledParcel&)> is_away) = 0;
  // Those that were fetched ahead and not read, or stay for a later reader; those that were fetched
  // in `backward`, and are of no use behind it.
  virtual std::vector<ScheduledParcel*> FetchedAhead() const = 0;
  virtual std::vector<ScheduledParcel*> FetchedIn(int64_t backward) const = 0;
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_OFFLOAD_SCHEDULE_H_
