// What comes back, when, and how long it stays.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "pinion/engine/plan/step_plan.h"
#include "pinion/engine/plan/target_schedule.h"

namespace pinion {

OffloadSchedule::Fetches TargetSchedule::TakeFetches(
    const SavedPlace& from, int64_t backward,
    absl::FunctionRef<bool(const ScheduledParcel&)> is_away) {
  if (!IsPlanned()) {
    return options_.memory_bytes.has_value() ? Fetches()
                                             : window_.TakeFetches(from, backward, is_away);
  }
  return TakePlannedFetch(is_away);
}

OffloadSchedule::Fetches TargetSchedule::TakePlannedFetch(
    absl::FunctionRef<bool(const ScheduledParcel&)> is_away) {
  Fetches taken;
  if (!window_.MayFetch()) return taken;
  const std::vector<StepMove>& moves = now_known_->plan().moves;
  for (; next_fetch_ < moves.size() && moves[next_fetch_].fetch_at <= now_; ++next_fetch_) {
    const StepMove& move = moves[next_fetch_];
    const uint32_t id = actual_[move.object];
    if (id != UINT32_MAX) CountIfOverdue(objects_[id]);  // it may be here again
    // What is to be read by now is fetched by whoever reads it.
    if (id == UINT32_MAX || move.read_at <= now_ || objects_[id].parcel == nullptr) continue;
    ScheduledParcel& parcel = *objects_[id].parcel;
    ++taken.looks;
    if (parcel.scheduled.fetched_ahead || !is_away(parcel)) continue;
    if (MissingBytes(parcel.size_bytes) > 0) break;  // the device has more than it had: later
    window_.TakeFetch(parcel);
    taken.parcels.push_back(&parcel);
    ++next_fetch_;
    break;
  }
  return taken;
}

std::vector<ScheduledParcel*> TargetSchedule::TakeStayedFor(uint64_t size_bytes) {
  std::vector<ScheduledParcel*> taken;
  if (size_bytes == 0) return taken;
  std::vector<std::pair<size_t, ScheduledParcel*>> stayed;  // with the next use
  for (uint32_t id = 0; id < objects_.size(); ++id) {
    const Object& object = objects_[id];
    const bool stays = object.parcel != nullptr && StaysFetched(*object.parcel);
    // Its reader is about to read what was used last.
    if (!stays || id == used_last_) continue;
    stayed.emplace_back(now_known_->NextUse(object.planned, now_).value_or(SIZE_MAX),
                        object.parcel);
  }
  std::sort(stayed.begin(), stayed.end(), std::greater<>());
  for (const auto& [next_use, parcel] : stayed) {
    if (size_bytes == 0) break;
    taken.push_back(parcel);
    size_bytes -= std::min(size_bytes, parcel->size_bytes);
  }
  return taken;
}

std::vector<ScheduledParcel*> TargetSchedule::FetchedAhead() const {
  std::vector<ScheduledParcel*> parcels = window_.FetchedAhead();
  for (const Object& object : objects_) {
    const bool stays = object.parcel != nullptr && StaysFetched(*object.parcel);
    if (stays && !object.parcel->scheduled.fetched_ahead) parcels.push_back(object.parcel);
  }
  return parcels;
}

std::vector<ScheduledParcel*> TargetSchedule::FetchedIn(int64_t backward) const {
  std::vector<ScheduledParcel*> parcels = window_.FetchedIn(backward);
  if (!IsPlanned()) return parcels;
  std::erase_if(parcels, [this](const ScheduledParcel* parcel) {
    return StaysFetched(*parcel) &&
           now_known_->IsHereUntilNextUse(objects_[parcel->objects.front()].planned, now_);
  });
  // The plan may have fetched them for the next backward.
  for (const StepMove& move : now_known_->plan().moves) {
    const uint32_t id = actual_[move.object];
    if (id == UINT32_MAX || move.fetch_at > now_ || move.read_at <= now_) continue;
    std::erase(parcels, objects_[id].parcel);
  }
  return parcels;
}

}  // namespace pinion
