// Where the objects of the step that runs are: on the device, in a parcel that has left, or back
// from there; which of them a plan wants away, and which parcels are due to be evicted for it.
//
//   places.Add(object, size_bytes);                     // it was saved
//   places.OnLeft(parcel, now);                         // its copy out was submitted
//   places.WantAway(object, until, /*frees=*/true, now);
//   for (ScheduledParcel* parcel : places.TakeDue()) ...
//
// Times are uses of the known step that the step goes on as. Where it goes on as none, nothing is
// wanted away, and `now` does not matter.
//
// Thread safety: none.
// Ownership: parcels are the caller's, and known from OnLeft to OnGone.

#ifndef PINION_ENGINE_SCHEDULE_RESIDENCY_TRACKER_H_
#define PINION_ENGINE_SCHEDULE_RESIDENCY_TRACKER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "pinion/engine/schedule/offload_schedule.h"

namespace pinion {

class ResidencyTracker {
 public:
  // Another step begins.
  void Clear() { objects_.clear(); }
  // On the device. The number is the next one, or one that was released.
  void Add(uint32_t id, uint64_t size_bytes);
  // Nobody needs it.
  void Release(uint32_t id);

  void OnLeft(ScheduledParcel& parcel, size_t now);
  void OnFetched(const ScheduledParcel& parcel);
  void OnDropped(const ScheduledParcel& parcel);
  void OnGone(const ScheduledParcel& parcel);
  // Its parcel was evicted, and others hold the object's memory as well.
  void OnNotFreed(uint32_t id, size_t now);

  // --- what a plan wants ---

  // Nothing is away by plan any more, and nothing is due.
  void ForgetPlan();
  // It is to be away from now until use `until`, and once it has left it is due. `frees`: what is
  // here of it all the same is more than was planned.
  void WantAway(uint32_t id, uint32_t until, bool frees, size_t now);
  // Time has passed: it may be here again.
  void CountIfOverdue(uint32_t id, size_t now) { CountIfOverdue(objects_[id], now); }
  // Of what is wanted away and is here: it has not left yet, or others hold it.
  uint64_t overdue_bytes() const { return overdue_bytes_; }

  // Of what is due and has come back: it is dropped once more.
  uint64_t DueAgainBytes() const;
  void AddDue(ScheduledParcel& parcel) { due_.push_back(&parcel); }
  // All that has left.
  void AddAllDue();
  // To be evicted, that have left or come back since.
  std::vector<ScheduledParcel*> TakeDue() { return std::exchange(due_, {}); }

  // It stays on the device for now, and is not copied.
  void SetStays(uint32_t id, bool stays) { objects_[id].stays = stays; }
  bool Stays(uint32_t id) const { return objects_[id].stays; }
  // Whether it stayed until now.
  bool StopStaying(uint32_t id) { return std::exchange(objects_[id].stays, false); }
  // What was fetched of it is for its next reader as well.
  void SetStaysFetched(uint32_t id, bool stays) { objects_[id].stays_fetched = stays; }

  // --- where they are ---

  uint64_t SizeBytes(uint32_t id) const { return objects_[id].size_bytes; }
  // Null: it has not left.
  ScheduledParcel* ParcelOf(std::optional<uint32_t> id) const {
    return id.has_value() ? objects_[*id].parcel : nullptr;
  }
  // What a reader has to fetch for it.
  uint64_t AwayBytes(uint32_t id) const;
  // What was fetched of the parcel can be dropped once more without any others.
  bool IsFetchedAlone(const ScheduledParcel& parcel) const {
    return parcel.objects.size() == 1 && objects_[parcel.objects.front()].is_fetched;
  }
  // The same, and it is for its object's next reader as well.
  bool StaysFetched(const ScheduledParcel& parcel) const {
    return IsFetchedAlone(parcel) && objects_[parcel.objects.front()].stays_fetched;
  }
  // Objects whose parcels do.
  std::vector<uint32_t> AllThatStayFetched() const;

 private:
  struct Object {
    uint64_t size_bytes = 0;
    bool is_needed = true;
    bool stays = false;
    uint32_t away_until = 0;            // use of the known step, from the last drop on
    bool away_frees = false;            // WantAway's
    bool is_held = false;               // it was evicted, and others hold its memory as well
    bool is_overdue = false;            // it counts among `overdue_bytes_`
    bool is_fetched = false;            // it has come back, and may have been let go of since
    bool stays_fetched = false;         // what was fetched is for its next reader as well
    ScheduledParcel* parcel = nullptr;  // once it has left
  };

  void CountAsOverdue(Object& object, bool is_overdue);
  void CountIfOverdue(Object& object, size_t now);

  std::vector<Object> objects_;
  uint64_t overdue_bytes_ = 0;
  std::vector<ScheduledParcel*> due_;
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_RESIDENCY_TRACKER_H_
