#include "pinion/engine/schedule/planned_schedule.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "pinion/engine/link/packing.h"
#include "pinion/engine/planner/step_plan.h"

namespace pinion {
namespace {

// With a target, no window counts but what this schedule asks for by itself.
WindowOptions WindowsOf(const TargetOptions& options) {
  WindowOptions windows = options.windows;
  if (options.memory_bytes.has_value()) windows.eviction_bytes = windows.prefetch_bytes = 0;
  return windows;
}

// How much more than the limit that is.
uint64_t Beyond(uint64_t limit_bytes, uint64_t bytes) {
  return bytes - std::min(bytes, limit_bytes);
}

}  // namespace

TargetSchedule::TargetSchedule(const TargetOptions& options)
    : options_(options),
      small_bytes_(LargestSmallPiece(options.link)),
      window_(WindowsOf(options)) {}

// --------------------------------------------------------------------------------- known steps

void TargetSchedule::FindKnown(bool begins) {
  std::optional<StepProgress::Match> match;
  const auto find = [&](bool fits) {
    return known_.Find([&](const KnownStep& known) {
      if (known.shortfall().ok() == fits && segments_.Fits(known)) {
        match = progress_.MatchWith(known);
      }
      return match.has_value();
    });
  };
  std::shared_ptr<const KnownStep> found = find(/*fits=*/true);
  if (found == nullptr) found = find(/*fits=*/false);
  progress_.FollowNone();
  places_.ForgetPlan();
  due_moves_ = DueMoves();
  has_late_ = true;
  // A step that begins with a segment may try a mix by now. Whether it is the step that the mix was
  // made for is seen in its record.
  if (begins && !segments_.IsTrying() && is_recorded_ && found != nullptr &&
      segments_.MayTry(*found, known_)) {
    segments_.Try(found);
  }
  const bool tries = begins && segments_.IsTrying();
  if (!tries) {
    if (const auto wrong = segments_.Follow(found)) known_.Forget(*wrong);
  }
  is_lost_ = found == nullptr || tries;
  if (is_lost_ || !found->shortfall().ok()) {
    places_.AddAllDue();  // what has come back goes once more
    return;
  }
  due_moves_ = DueMoves(*found);
  progress_.Follow(std::move(found), *std::move(match));
}

std::optional<uint32_t> TargetSchedule::OnSegment(ScopeId scope) {
  if (IsInStep()) return segments_.OnSegment();
  if (!segments_.has_early()) early_scope_ = scope;
  return segments_.OnEarlySegment(known_.Likeliest(), is_recorded_, known_);
}

// ------------------------------------------------------------------------------ what happens

Fate TargetSchedule::OnSaved(ScopeId scope, const SavedObject& saved) {
  window_.OnSaved(scope, saved);
  const bool begins = !IsInStep();
  if (begins) {
    progress_.Begin();
    places_.Clear();
    known_.OnBegin();
    segments_.OnBegin(saved.signature);
  }
  const auto [id, fits] = progress_.OnSaved(saved.signature);
  places_.Add(id, saved.size_bytes);
  if (begins || !fits) FindKnown(begins);
  OnUsed(id, Use::kSaved);
  const bool stays = IsPlanned() && followed()->Stays(progress_.planned(id), progress_.now());
  places_.SetStays(id, stays);
  return {.object = id,
          .leaves = !stays,
          .even_if_held = IsPlanned() || options_.memory_bytes.has_value()};
}

uint64_t TargetSchedule::CompanyOf(uint32_t id) const {
  // What is large shares no parcel anyhow, but what leaves together has left when all of it has.
  const bool is_large = places_.SizeBytes(id) > small_bytes_;
  const bool is_alone = !is_large && options_.memory_bytes.has_value();
  if (!IsPlanned()) return is_alone ? KnownStep::AloneCompany(id) : 0;
  const uint32_t planned = progress_.planned(id);
  // It leaves for the target, and comes back alone.
  if (is_alone && !followed()->Moves(planned)) return KnownStep::AloneCompany(id);
  return is_large ? followed()->LargeCompany(planned) : followed()->Company(planned);
}

void TargetSchedule::OnUsed(uint32_t id, Use use) {
  if (!progress_.OnUsed(id, use)) FindKnown(/*begins=*/false);
  const bool is_kept = use == Use::kReadAndKept || use == Use::kReadIntoGraph;
  places_.SetStaysFetched(id, is_kept && IsPlanned() && IsHereUntilNextUse(id));
  awaited_bytes_ = places_.AwayBytes(id);
}

void TargetSchedule::OnReleased(uint32_t object) {
  progress_.OnReleased(object);
  places_.Release(object);
  if (IsInStep()) return;
  known_.OnEnd(followed().get());
  // What tries a mix is most likely the step that was known.
  Pace().OnEnd(/*is_unknown=*/is_lost_ && !segments_.IsTrying());
}

void TargetSchedule::OnLeft(ScheduledParcel& parcel, absl::Span<const HeldBytes> held) {
  window_.OnLeft(parcel, held);
  places_.OnLeft(parcel, progress_.now());
}

void TargetSchedule::OnFetched(ScheduledParcel& parcel, int64_t backward) {
  places_.OnFetched(parcel);
  awaited_bytes_ = 0;
  // Its reader has it, and the next one may be far away.
  if (!IsPlanned() && options_.memory_bytes.has_value()) places_.AddDue(parcel);
  window_.OnFetched(parcel, backward);
}

bool TargetSchedule::OnDropped(ScheduledParcel& parcel) {
  places_.OnDropped(parcel);
  return window_.OnDropped(parcel);
}

bool TargetSchedule::OnGone(ScheduledParcel& parcel) {
  places_.OnGone(parcel);
  return window_.OnGone(parcel);
}

void TargetSchedule::OnFetchesRefused(absl::Span<ScheduledParcel* const> parcels) {
  window_.OnFetchesRefused(parcels);
  due_moves_.RestartFetches();
}

void TargetSchedule::OnRoomWanted() {
  window_.OnRoomWanted();
  due_moves_.RestartFetches();
}

// -------------------------------------------------------------------------------- what leaves

std::vector<uint32_t> TargetSchedule::TakeLateLeavers() {
  std::vector<uint32_t> late;
  const auto leave = [&](uint32_t id) {
    if (places_.StopStaying(id)) late.push_back(id);
  };
  if (std::exchange(has_late_, false)) {
    for (uint32_t id = 0; id < progress_.object_count(); ++id) {
      if (!IsPlanned() || !followed()->Stays(progress_.planned(id), progress_.now())) leave(id);
    }
  }
  if (!IsPlanned()) return late;
  const auto leave_all = [&](absl::Span<const uint32_t> copies) {
    for (const uint32_t copy : copies) {
      const StepMove& move = followed()->plan().moves[copy];
      if (const auto id = progress_.ObjectFor(move.object)) leave(*id);
    }
  };
  leave_all(due_moves_.TakeCopies(progress_.now()));
  if (std::exchange(all_leave_, false)) leave_all(due_moves_.CopiesToCome());
  LeaveForTarget(late);
  return late;
}

void TargetSchedule::LeaveForTarget(std::vector<uint32_t>& late) {
  const uint64_t missing_bytes = MissingFor(awaited_bytes_).bytes;
  if (missing_bytes == 0) return;
  DropAsPlanned();
  const ScheduledParcel* const read_now = places_.ParcelOf(progress_.used_last());
  uint64_t leaving_bytes = window_.WindowBytesWithout(read_now) + places_.DueAgainBytes();
  for (const uint32_t id : late) leaving_bytes += places_.SizeBytes(id);
  if (leaving_bytes >= missing_bytes) return;
  for (const auto& [next_use, parcel] : Unread()) leaving_bytes += parcel->size_bytes;
  if (leaving_bytes >= missing_bytes) return;
  std::vector<std::pair<size_t, uint32_t>> kept;  // with the next use
  for (uint32_t id = 0; id < progress_.object_count(); ++id) {
    if (!places_.Stays(id) || id == progress_.used_last()) continue;
    if (followed()->FreesBehind(progress_.planned(id), progress_.now())) {
      kept.emplace_back(NextUseOf(id), id);
    }
  }
  std::sort(kept.begin(), kept.end(), std::greater<>());
  for (const auto& [next_use, id] : kept) {
    if (leaving_bytes >= missing_bytes) return;
    places_.StopStaying(id);
    late.push_back(id);
    leaving_bytes += places_.SizeBytes(id);
  }
}

ScheduledParcels TargetSchedule::TakeEvictions() {
  if (!IsPlanned()) {
    return options_.memory_bytes.has_value() ? TakeUnplanned() : window_.TakeEvictions();
  }
  DropAsPlanned();
  ScheduledParcels taken;
  for (ScheduledParcel* parcel : places_.TakeDue()) {
    if (window_.Take(*parcel) || places_.IsFetchedAlone(*parcel)) taken.push_back(parcel);
  }
  return taken.empty() ? TakeMissing() : taken;
}

ScheduledParcels TargetSchedule::TakeUnplanned() {
  ScheduledParcels taken = window_.TakeDownTo(0);
  for (ScheduledParcel* parcel : places_.TakeDue()) {
    if (!places_.IsFetchedAlone(*parcel)) continue;
    // One reader after another has saved the same: it would come back at once, beside what the
    // one before still has.
    if (parcel->objects.front() == progress_.used_last()) {
      places_.AddDue(*parcel);
    } else {
      taken.push_back(parcel);
    }
  }
  return taken;
}

void TargetSchedule::DropAsPlanned() {
  const size_t now = progress_.now();
  for (const uint32_t drop : due_moves_.TakeDrops(now)) {
    const StepMove& move = followed()->plan().moves[drop];
    const std::optional<uint32_t> id = progress_.ObjectFor(move.object);
    // Uses that were left out may lie between: by now it is to be back.
    if (!id.has_value() || move.fetch_at <= now) continue;
    places_.WantAway(*id, move.fetch_at, followed()->step().objects[move.object].frees, now);
  }
}

ScheduledParcels TargetSchedule::TakeMissing() {
  const Missing missing = MissingFor(awaited_bytes_);
  const ScheduledParcel* const read_now = places_.ParcelOf(progress_.used_last());
  const uint64_t beyond_bytes = Beyond(window_.WindowBytesWithout(read_now), missing.bytes);
  // What has left needs no copy out, and is to go anyway.
  ScheduledParcels taken =
      window_.TakeDownTo(Beyond(missing.with_visitors_bytes, window_.window_bytes()), read_now);
  if (beyond_bytes == 0) return taken;
  uint64_t dropped_bytes = 0;
  for (const auto& [next_use, parcel] : Unread()) {
    if (dropped_bytes >= beyond_bytes) break;
    taken.push_back(parcel);
    dropped_bytes += parcel->size_bytes;
  }
  if (dropped_bytes > 0) due_moves_.RestartFetches();
  return taken;
}

std::vector<std::pair<size_t, ScheduledParcel*>> TargetSchedule::Unread() const {
  std::vector<std::pair<size_t, ScheduledParcel*>> unread;
  for (ScheduledParcel* const parcel : FetchedAhead()) {
    // Its reader is about to read what was used last.
    if (parcel == places_.ParcelOf(progress_.used_last())) continue;
    size_t next_use = SIZE_MAX;
    for (const uint32_t id : parcel->objects) next_use = std::min(next_use, NextUseOf(id));
    unread.emplace_back(next_use, parcel);
  }
  std::stable_sort(unread.begin(), unread.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  return unread;
}

TargetSchedule::Missing TargetSchedule::MissingFor(uint64_t more_bytes) const {
  if (!options_.memory_bytes.has_value()) return {};
  // Between which of its uses a step is that leaves some out is not known.
  const uint64_t growth_bytes =
      progress_.skips() ? followed()->MostGrowthBytes() : followed()->GrowthBytes(progress_.now());
  const uint64_t wanted_bytes = device_bytes_ + growth_bytes + more_bytes;
  const uint64_t planned_bytes = followed()->plan().peak_bytes + visiting_bytes_;
  return {.bytes = Beyond(std::max(*options_.memory_bytes, planned_bytes), wanted_bytes),
          .with_visitors_bytes = Beyond(*options_.memory_bytes, wanted_bytes)};
}

// ---------------------------------------------------------------- what comes back, and stays

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
  const size_t now = progress_.now();
  for (; const StepMove* const move = due_moves_.NextFetch(now); due_moves_.PassFetch()) {
    const std::optional<uint32_t> id = progress_.ObjectFor(move->object);
    if (id.has_value()) places_.CountIfOverdue(*id, now);  // it may be here again
    // What is to be read by now is fetched by whoever reads it.
    if (!id.has_value() || move->read_at <= now || places_.ParcelOf(*id) == nullptr) continue;
    ScheduledParcel& parcel = *places_.ParcelOf(*id);
    ++taken.looks;
    if (parcel.scheduled.fetched_ahead || !is_away(parcel)) continue;
    if (MissingFor(parcel.size_bytes).bytes > 0) break;  // the device has more than it had: later
    window_.TakeFetch(parcel);
    taken.parcels.push_back(&parcel);
    due_moves_.PassFetch();
    break;
  }
  return taken;
}

std::vector<ScheduledParcel*> TargetSchedule::FetchedAhead() const {
  std::vector<ScheduledParcel*> parcels = window_.FetchedAhead();
  for (const uint32_t id : places_.AllThatStayFetched()) {
    ScheduledParcel* const parcel = places_.ParcelOf(id);
    if (!parcel->scheduled.fetched_ahead) parcels.push_back(parcel);
  }
  return parcels;
}

std::vector<ScheduledParcel*> TargetSchedule::FetchedIn(int64_t backward) const {
  std::vector<ScheduledParcel*> parcels = window_.FetchedIn(backward);
  if (!IsPlanned()) return parcels;
  std::erase_if(parcels, [this](const ScheduledParcel* parcel) {
    return StaysFetched(*parcel) && IsHereUntilNextUse(parcel->objects.front());
  });
  // The plan may have fetched them for the next backward.
  const size_t now = progress_.now();
  for (const StepMove& move : followed()->plan().moves) {
    const std::optional<uint32_t> id = progress_.ObjectFor(move.object);
    if (!id.has_value() || move.fetch_at > now || move.read_at <= now) continue;
    std::erase(parcels, places_.ParcelOf(*id));
  }
  return parcels;
}

}  // namespace pinion
