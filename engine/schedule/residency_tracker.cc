#include "pinion/engine/schedule/residency_tracker.h"

namespace pinion {

void ResidencyTracker::Add(uint32_t id, uint64_t size_bytes) {
  if (id == objects_.size()) objects_.emplace_back();
  objects_[id] = {.size_bytes = size_bytes};
}

void ResidencyTracker::Release(uint32_t id) {
  Object& object = objects_[id];
  object.is_needed = object.stays = object.stays_fetched = false;
  object.parcel = nullptr;
  CountAsOverdue(object, false);
}

// -------------------------------------------------------------------------- what happens to them

void ResidencyTracker::OnLeft(ScheduledParcel& parcel, size_t now) {
  bool is_due = false;
  for (const uint32_t id : parcel.objects) {
    objects_[id].parcel = &parcel;
    CountIfOverdue(objects_[id], now);
    is_due = is_due || now < objects_[id].away_until;
  }
  if (is_due) due_.push_back(&parcel);
}

void ResidencyTracker::OnFetched(const ScheduledParcel& parcel) {
  for (const uint32_t id : parcel.objects) {
    objects_[id].is_fetched = true;
    objects_[id].is_held = false;
  }
  std::erase(due_, &parcel);
}

void ResidencyTracker::OnDropped(const ScheduledParcel& parcel) {
  for (const uint32_t id : parcel.objects) {
    objects_[id].is_fetched = objects_[id].stays_fetched = false;
  }
}

void ResidencyTracker::OnGone(const ScheduledParcel& parcel) {
  for (const uint32_t id : parcel.objects) objects_[id].parcel = nullptr;
  std::erase(due_, &parcel);
}

void ResidencyTracker::OnNotFreed(uint32_t id, size_t now) {
  objects_[id].is_held = true;
  CountIfOverdue(objects_[id], now);
}

// ----------------------------------------------------------------------------- what a plan wants

void ResidencyTracker::ForgetPlan() {
  due_.clear();
  for (Object& object : objects_) {
    object.away_until = 0;
    CountAsOverdue(object, false);
  }
}

void ResidencyTracker::WantAway(uint32_t id, uint32_t until, bool frees, size_t now) {
  Object& object = objects_[id];
  object.away_until = until;
  object.away_frees = frees;
  if (object.parcel != nullptr) due_.push_back(object.parcel);
  CountIfOverdue(object, now);
}

void ResidencyTracker::CountAsOverdue(Object& object, bool is_overdue) {
  if (std::exchange(object.is_overdue, is_overdue) == is_overdue) return;
  overdue_bytes_ += is_overdue ? object.size_bytes : -object.size_bytes;
}

void ResidencyTracker::CountIfOverdue(Object& object, size_t now) {
  const bool is_here = object.is_needed && (object.is_held || object.parcel == nullptr);
  CountAsOverdue(object, is_here && now < object.away_until && object.away_frees);
}

void ResidencyTracker::AddAllDue() {
  for (const Object& object : objects_) {
    if (object.parcel != nullptr) due_.push_back(object.parcel);
  }
}

uint64_t ResidencyTracker::DueAgainBytes() const {
  uint64_t bytes = 0;
  for (const ScheduledParcel* parcel : due_) {
    if (!parcel->scheduled.in_window && IsFetchedAlone(*parcel)) bytes += parcel->size_bytes;
  }
  return bytes;
}

// -------------------------------------------------------------------------------- where they are

uint64_t ResidencyTracker::AwayBytes(uint32_t id) const {
  const ScheduledParcel* const parcel = objects_[id].parcel;
  const bool is_away =
      parcel != nullptr && !parcel->scheduled.in_window && !objects_[id].is_fetched;
  return is_away ? parcel->size_bytes : 0;
}

std::vector<uint32_t> ResidencyTracker::AllThatStayFetched() const {
  std::vector<uint32_t> ids;
  for (uint32_t id = 0; id < objects_.size(); ++id) {
    const ScheduledParcel* const parcel = objects_[id].parcel;
    if (parcel != nullptr && StaysFetched(*parcel)) ids.push_back(id);
  }
  return ids;
}

}  // namespace pinion
