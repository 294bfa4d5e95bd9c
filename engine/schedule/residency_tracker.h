// Tracks where the objects of the running step are: resident, offloaded, or fetched. Also tracks
// which of them the plan wants offloaded, and which parcels are due for eviction.
//
//   residency.Add(object, size_bytes);                  // it was saved
//   residency.OnLeft(parcel, now);                      // its copy out was submitted
//   residency.WantAway(object, until, /*frees=*/true, now);
//   for (ScheduledParcel* parcel : residency.TakeDueEvictions()) ...
//
// Times are accesses of the plan that the step follows. If it follows none, nothing is wanted
// offloaded, and `now` does not matter.
//
// Thread safety: none.
// Ownership: parcels are the caller's, and are known from OnLeft to OnGone.

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
  // Marks a new object as resident. `id` is the next free one, or a recycled one.
  void Add(uint32_t id, uint64_t size_bytes);
  // The object is no longer needed.
  void Release(uint32_t id);

  void OnLeft(ScheduledParcel& parcel, size_t now);
  void OnFetched(const ScheduledParcel& parcel);
  void OnDropped(const ScheduledParcel& parcel);
  void OnGone(const ScheduledParcel& parcel);
  // The parcel was evicted, but the object's memory is externally referenced.
  void OnNotFreed(uint32_t id, size_t now);

  // --- what a plan wants ---

  // Clears all that the plan wants, and what is due.
  void ForgetPlan();
  // The plan wants the object offloaded from now until access `until`. Its parcel becomes due.
  // `frees`: memory that stays resident nevertheless is more than planned.
  void WantAway(uint32_t id, uint32_t until, bool frees, size_t now);
  // Time has passed: the object may be resident again.
  void CountIfOverdue(uint32_t id, size_t now) { CountIfOverdue(objects_[id], now); }
  // Bytes of objects that the plan wants offloaded, and that are still resident or externally
  // referenced.
  uint64_t overdue_bytes() const { return overdue_bytes_; }

  // Fetched bytes of due parcels, which an eviction frees again.
  uint64_t DueAgainBytes() const;
  void AddDue(ScheduledParcel& parcel) { due_.push_back(&parcel); }
  // Makes all offloaded parcels due.
  void AddAllDue();
  // Returns due parcels, offloaded or fetched, and clears the list.
  std::vector<ScheduledParcel*> TakeDueEvictions() { return std::exchange(due_, {}); }

  // The object stays resident for now, without a copy.
  void SetStays(uint32_t id, bool stays) { objects_[id].stays = stays; }
  bool Stays(uint32_t id) const { return objects_[id].stays; }
  // Returns whether the object stayed until now.
  bool StopStaying(uint32_t id) { return std::exchange(objects_[id].stays, false); }
  // Its fetched memory is for the next reader as well.
  void SetStaysFetched(uint32_t id, bool stays) { objects_[id].stays_fetched = stays; }

  // --- where they are ---

  uint64_t SizeBytes(uint32_t id) const { return objects_[id].size_bytes; }
  // Null: the object was not offloaded.
  ScheduledParcel* ParcelOf(std::optional<uint32_t> id) const {
    return id.has_value() ? objects_[*id].parcel : nullptr;
  }
  // Bytes that a reader has to fetch for the object.
  uint64_t AwayBytes(uint32_t id) const;
  // Whether the parcel's fetched memory can be freed without affecting other objects.
  bool IsFetchedAlone(const ScheduledParcel& parcel) const {
    return parcel.objects.size() == 1 && objects_[parcel.objects.front()].is_fetched;
  }
  // The same, and the memory is for the object's next reader as well.
  bool StaysFetched(const ScheduledParcel& parcel) const {
    return IsFetchedAlone(parcel) && objects_[parcel.objects.front()].stays_fetched;
  }
  // Objects whose parcels stay fetched.
  std::vector<uint32_t> AllThatStayFetched() const;

 private:
  struct Object {
    uint64_t size_bytes = 0;
    bool is_needed = true;
    bool stays = false;
    uint32_t away_until = 0;            // access of the plan, from the last eviction on
    bool away_frees = false;            // WantAway's
    bool is_held = false;               // evicted, but externally referenced
    bool is_overdue = false;            // counted in `overdue_bytes_`
    bool is_fetched = false;            // fetched, and maybe freed since
    bool stays_fetched = false;         // the fetched memory is for the next reader as well
    ScheduledParcel* parcel = nullptr;  // once it was offloaded
  };

  void CountAsOverdue(Object& object, bool is_overdue);
  void CountIfOverdue(Object& object, size_t now);

  std::vector<Object> objects_;
  uint64_t overdue_bytes_ = 0;
  std::vector<ScheduledParcel*> due_;
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_RESIDENCY_TRACKER_H_
