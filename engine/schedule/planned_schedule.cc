#include "pinion/engine/schedule/planned_schedule.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "pinion/engine/link/packing.h"
#include "pinion/engine/planner/step_plan.h"

namespace pinion {
namespace {

// With a target there are no windows but those of this schedule.
WindowOptions WindowsWithoutPlan(const TargetOptions& options) {
  WindowOptions windows = options.windows;
  if (options.memory_bytes.has_value()) windows.eviction_bytes = windows.prefetch_bytes = 0;
  return windows;
}

// The excess of `bytes` over the limit.
uint64_t Beyond(uint64_t limit_bytes, uint64_t bytes) {
  return bytes - std::min(bytes, limit_bytes);
}

}  // namespace

PlannedSchedule::PlannedSchedule(const TargetOptions& options)
    : OffloadSchedule(WindowsWithoutPlan(options)),
      options_(options),
      small_bytes_(LargestSmallPiece(options.link)) {}

// --------------------------------------------------------------------------------- known steps

void PlannedSchedule::FindCached(bool begins) {
  steps_vary_ = steps_vary_ || (IsPlanned() && exceeded_at_ == matcher_.now());
  exceeded_at_.reset();
  std::optional<StepMatcher::Match> match;
  const auto find = [&](bool fits, bool may_skip) {
    return cache_.Find([&](const CachedPlan& cached) {
      match.reset();
      if (cached.CanRunWith(begin_bytes_) == fits && trials_.Fits(cached)) {
        match = matcher_.MatchWith(cached);
      }
      return match.has_value() && (may_skip || !match->skips);
    });
  };
  std::shared_ptr<const CachedPlan> found;
  for (const bool fits : {true, false}) {
    for (const bool may_skip : {false, true}) {
      if (found == nullptr) found = find(fits, may_skip);
    }
  }
  matcher_.FollowNone();
  residency_.ForgetPlan();
  cursor_ = PlanCursor();
  alike_.clear();
  has_deferred_ = true;
  // A step that begins with a segment may try recomputation now. Its record will tell whether it is
  // the step that the trial is for.
  if (begins && !trials_.IsTrying() && is_recorded_ && found != nullptr &&
      trials_.MayTry(*found, cache_)) {
    trials_.Try(found);
  }
  const bool tries = begins && trials_.IsTrying();
  if (!tries) {
    if (const auto wrong = trials_.Follow(found)) cache_.Forget(*wrong);
  }
  is_lost_ = found == nullptr || tries;
  begins_unplanned_ = is_lost_ || !found->CanRunWith(begin_bytes_);
  if (begins_unplanned_) {
    residency_.AddAllDue();  // fetched parcels are evicted again
    return;
  }
  cursor_ = PlanCursor(*found);
  for (const std::shared_ptr<const CachedPlan>& other : cache_.all()) {
    if (other == found || !cache_.MayBe(*other)) continue;
    const size_t alike = found->AccessesAlike(*other);
    if (alike > match->now) alike_.emplace_back(other, alike);
  }
  matcher_.Follow(std::move(found), *std::move(match));
}

void PlannedSchedule::ForEachPossible(absl::FunctionRef<void(const CachedPlan&)> visit) const {
  visit(*followed());
  for (const auto& [other, accesses] : alike_) {
    if (matcher_.now() < accesses) visit(*other);
  }
}

bool PlannedSchedule::IsAnotherWithoutSkips() const {
  return std::any_of(alike_.begin(), alike_.end(), [this](const auto& other) {
    if (!other.first->CanRunWith(begin_bytes_) || !trials_.Fits(*other.first)) return false;
    const std::optional<StepMatcher::Match> match = matcher_.MatchWith(*other.first);
    return match.has_value() && !match->skips;
  });
}

std::optional<PeakBound> PlannedSchedule::StepPeakBound() const {
  if (!IsInStep() || !IsPlanned()) return std::nullopt;
  PeakBound peak_bound;
  ForEachPossible([&](const CachedPlan& cached) {
    const uint64_t bytes = cached.plan().peak_bytes + cached.ExcessBytes(begin_bytes_);
    peak_bound.most_bytes = std::max(peak_bound.most_bytes, bytes);
    peak_bound.moves = peak_bound.moves || !cached.plan().moves.empty();
  });
  peak_bound.most_bytes += residency_.overdue_bytes();
  return peak_bound;
}

std::optional<uint32_t> PlannedSchedule::OnSegment(ScopeId scope) {
  if (IsInStep()) return trials_.OnSegment();
  if (!trials_.has_early()) early_scope_ = scope;
  return trials_.OnEarlySegment(cache_.Likeliest(), is_recorded_, cache_);
}

// ------------------------------------------------------------------------------ what happens

SaveDecision PlannedSchedule::OnSaved(ScopeId scope, const SavedObject& saved) {
  OffloadSchedule::OnSaved(scope, saved);
  const bool begins = !IsInStep();
  if (begins) {
    matcher_.Begin();
    residency_.Clear();
    begin_bytes_ = Beyond(streamed_bytes_, device_bytes_);
    cache_.OnBegin();
    trials_.OnBegin(saved.signature);
  }
  const auto [id, fits] = matcher_.OnSaved(saved.signature);
  residency_.Add(id, saved.size_bytes);
  if (begins || !fits) FindCached(begins);
  OnUsed(id, AccessKind::kSaved);
  const bool stays = IsPlanned() && followed()->Stays(matcher_.planned(id), matcher_.now());
  residency_.SetStays(id, stays);
  return {.object = id,
          .leaves = !stays,
          .even_if_held = IsPlanned() || options_.memory_bytes.has_value()};
}

uint64_t PlannedSchedule::BatchKey(uint32_t id) const {
  // Large objects share no parcel, but a batch completes as a whole.
  const bool is_large = residency_.SizeBytes(id) > small_bytes_;
  const bool is_alone = !is_large && options_.memory_bytes.has_value();
  if (!IsPlanned()) return is_alone ? CachedPlan::UniqueBatchKey(id) : 0;
  const uint32_t planned = matcher_.planned(id);
  if (is_large) return followed()->LargeBatchKey(planned);
  return is_alone ? SmallBatchKey(id) : followed()->BatchKey(planned);
}

// A parcel is evicted and fetched as a whole, which only a plan that moves all of it has counted.
// An object that leaves for the target alone is fetched alone.
uint64_t PlannedSchedule::SmallBatchKey(uint32_t id) const {
  constexpr uint64_t kFactor = 0x100000001b3;          // FNV's prime
  constexpr uint64_t kMost = (uint64_t{1} << 62) - 1;  // above: large and single objects
  uint64_t key = 0;
  bool is_shared = true;
  ForEachPossible([&](const CachedPlan& cached) {
    const uint64_t one_key = cached.BatchKey(matcher_.planned(id));
    is_shared = is_shared && one_key != 0 && one_key <= kMost;
    key = (key * kFactor + one_key) & kMost;
  });
  return is_shared ? key : CachedPlan::UniqueBatchKey(id);
}

void PlannedSchedule::OnUsed(uint32_t id, AccessKind access) {
  const bool had_skips = matcher_.skips();
  const bool matches = matcher_.OnUsed(id, access);
  const bool begins_to_skip = !had_skips && matcher_.skips();
  if (!matches || (begins_to_skip && IsAnotherWithoutSkips())) FindCached(/*begins=*/false);
  const bool is_kept = access == AccessKind::kReadAndKept || access == AccessKind::kReadIntoGraph;
  residency_.SetStaysFetched(id, is_kept && IsPlanned() && IsResidentUntilNextAccess(id));
  awaited_bytes_ = residency_.AwayBytes(id);
}

void PlannedSchedule::OnGrowth(uint64_t growth_bytes, bool exceeds) {
  if (!IsPlanned()) return;
  if (exceeds) exceeded_at_ = matcher_.now();
  if (growth_bytes <= GrowthBytes()) return;
  if (grown_.empty() || grown_.back().cached != followed()) grown_.push_back({followed(), {}, {}});
  (exceeds ? grown_.back().exceeding : grown_.back().fitting)
      .push_back({.access = static_cast<uint32_t>(matcher_.now()), .size_bytes = growth_bytes});
}

void PlannedSchedule::OnReleased(uint32_t object) {
  matcher_.OnReleased(object);
  residency_.Release(object);
  if (IsInStep()) return;
  cache_.OnEnd(followed().get());
  // A step that tests a recomputation plan counts as recognised.
  Backoff().OnEnd(/*is_unknown=*/is_lost_ && !trials_.IsTrying());
}

void PlannedSchedule::OnLeft(ScheduledParcel& parcel, absl::Span<const HeldBytes> held) {
  OffloadSchedule::OnLeft(parcel, held);
  residency_.OnLeft(parcel, matcher_.now());
}

void PlannedSchedule::OnFetched(ScheduledParcel& parcel, int64_t backward) {
  residency_.OnFetched(parcel);
  awaited_bytes_ = 0;
  // Its reader has the bytes, and the next reader may be far away.
  if (!IsPlanned() && options_.memory_bytes.has_value()) residency_.AddDue(parcel);
  OffloadSchedule::OnFetched(parcel, backward);
}

bool PlannedSchedule::OnDropped(ScheduledParcel& parcel) {
  residency_.OnDropped(parcel);
  return OffloadSchedule::OnDropped(parcel);
}

bool PlannedSchedule::OnGone(ScheduledParcel& parcel) {
  residency_.OnGone(parcel);
  return OffloadSchedule::OnGone(parcel);
}

void PlannedSchedule::OnFetchesRefused(absl::Span<ScheduledParcel* const> parcels) {
  OffloadSchedule::OnFetchesRefused(parcels);
  cursor_.RestartFetches();
}

void PlannedSchedule::OnRoomWanted() {
  OffloadSchedule::OnRoomWanted();
  cursor_.RestartFetches();
}

// -------------------------------------------------------------------------------- what leaves

std::vector<uint32_t> PlannedSchedule::TakeDeferredOffloads() {
  std::vector<uint32_t> deferred;
  const auto leave = [&](uint32_t id) {
    if (residency_.StopStaying(id)) deferred.push_back(id);
  };
  if (std::exchange(has_deferred_, false)) {
    for (uint32_t id = 0; id < matcher_.object_count(); ++id) {
      if (!IsPlanned() || !followed()->Stays(matcher_.planned(id), matcher_.now())) leave(id);
    }
  }
  if (!IsPlanned()) return deferred;
  const auto leave_all = [&](absl::Span<const uint32_t> copies) {
    for (const uint32_t copy : copies) {
      const StepMove& move = followed()->plan().moves[copy];
      if (const auto id = matcher_.ObjectFor(move.object)) leave(*id);
    }
  };
  leave_all(cursor_.TakeCopies(matcher_.now()));
  if (std::exchange(all_leave_, false)) leave_all(cursor_.CopiesToCome());
  ChooseForTarget(deferred);
  return deferred;
}

void PlannedSchedule::ChooseForTarget(std::vector<uint32_t>& deferred) {
  const uint64_t missing_bytes = MissingFor(awaited_bytes_).bytes;
  if (missing_bytes == 0) return;
  EvictAsPlanned();
  uint64_t leaving_bytes = LeavingBytes();
  for (const uint32_t id : deferred) leaving_bytes += residency_.SizeBytes(id);
  if (Beyond(leaving_bytes, missing_bytes) == 0) return;
  std::vector<std::pair<size_t, uint32_t>> kept;  // with the next access
  for (uint32_t id = 0; id < matcher_.object_count(); ++id) {
    if (!residency_.Stays(id) || id == matcher_.used_last()) continue;
    if (followed()->FreesBehind(matcher_.planned(id), matcher_.now())) {
      kept.emplace_back(NextAccessOf(id), id);
    }
  }
  std::sort(kept.begin(), kept.end(), std::greater<>());
  for (const auto& [next_access, id] : kept) {
    if (leaving_bytes >= missing_bytes) return;
    residency_.StopStaying(id);
    deferred.push_back(id);
    leaving_bytes += residency_.SizeBytes(id);
  }
}

ScheduledParcels PlannedSchedule::TakeEvictions() {
  if (!IsPlanned()) {
    return options_.memory_bytes.has_value() ? TakeUnplanned() : OffloadSchedule::TakeEvictions();
  }
  EvictAsPlanned();
  ScheduledParcels taken;
  for (ScheduledParcel* parcel : residency_.TakeDueEvictions()) {
    if (Take(*parcel) || residency_.IsFetchedAlone(*parcel)) taken.push_back(parcel);
  }
  return taken.empty() ? TakeMissing() : taken;
}

ScheduledParcels PlannedSchedule::TakeUnplanned() {
  ScheduledParcels taken = TakeDownTo(0);
  for (ScheduledParcel* parcel : residency_.TakeDueEvictions()) {
    if (!residency_.IsFetchedAlone(*parcel)) continue;
    // Several readers in a row share the object. It would be fetched again at once, beside the
    // memory that the reader before still has.
    if (parcel->objects.front() == matcher_.used_last()) {
      residency_.AddDue(*parcel);
    } else {
      taken.push_back(parcel);
    }
  }
  return taken;
}

void PlannedSchedule::EvictAsPlanned() {
  const size_t now = matcher_.now();
  for (const uint32_t drop : cursor_.TakeEvictionsDue(now)) {
    const StepMove& move = followed()->plan().moves[drop];
    const std::optional<uint32_t> id = matcher_.ObjectFor(move.object);
    // If accesses were left out, the object is to be resident by now.
    if (!id.has_value() || move.fetch_at <= now) continue;
    residency_.WantAway(*id, move.fetch_at, followed()->step().objects[move.object].frees, now);
  }
}

ScheduledParcels PlannedSchedule::TakeMissing() {
  const Missing missing = MissingFor(awaited_bytes_);
  const ScheduledParcel* const read_now = residency_.ParcelOf(matcher_.used_last());
  const uint64_t beyond_bytes = Beyond(WindowBytesWithout(read_now), missing.bytes);
  // These parcels need no copy out and are evicted anyway.
  ScheduledParcels taken = TakeDownTo(Beyond(missing.most(), window_bytes()), read_now);
  if (beyond_bytes == 0) return taken;
  uint64_t dropped_bytes = 0;
  for (const auto& [next_access, parcel] : Unread()) {
    if (dropped_bytes >= beyond_bytes) break;
    taken.push_back(parcel);
    dropped_bytes += parcel->size_bytes;
  }
  if (dropped_bytes > 0) cursor_.RestartFetches();
  return taken;
}

std::vector<std::pair<size_t, ScheduledParcel*>> PlannedSchedule::Unread() const {
  std::vector<std::pair<size_t, ScheduledParcel*>> unread;
  for (ScheduledParcel* const parcel : FetchedAhead()) {
    // Its reader is about to read the last accessed object.
    if (parcel == residency_.ParcelOf(matcher_.used_last())) continue;
    size_t next_access = SIZE_MAX;
    for (const uint32_t id : parcel->objects) next_access = std::min(next_access, NextAccessOf(id));
    unread.emplace_back(next_access, parcel);
  }
  std::stable_sort(unread.begin(), unread.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  return unread;
}

uint64_t PlannedSchedule::GrowthBytes() const {
  const size_t now = matcher_.now();
  uint64_t growth_bytes = 0;
  ForEachPossible([&](const CachedPlan& cached) {
    growth_bytes = std::max(growth_bytes, cached.GrowthBytes(now));
    if (steps_vary_) growth_bytes = std::max(growth_bytes, cached.SaveGrowthBytes(now));
    // The position of a step that left accesses out is not known.
    if (matcher_.skips()) growth_bytes = std::max(growth_bytes, cached.MostGrowthBytes());
  });
  return growth_bytes;
}

PlannedSchedule::Missing PlannedSchedule::MissingFor(uint64_t more_bytes) const {
  if (!options_.memory_bytes.has_value()) return {};
  const uint64_t wanted_bytes = device_bytes_ + GrowthBytes() + more_bytes;
  // The plan leaves room for a layer of streamed weights, which the next operator may fetch.
  const uint64_t weights_bytes =
      std::max(streamed_bytes_, Beyond(followed()->memory_bytes(), *options_.memory_bytes));
  const uint64_t step_bytes = Beyond(weights_bytes, *options_.memory_bytes);
  const uint64_t planned_bytes = std::max(step_bytes, followed()->plan().peak_bytes);
  return {.bytes = Beyond(planned_bytes + streamed_bytes_, wanted_bytes),
          .beyond_target_bytes = Beyond(*options_.memory_bytes, wanted_bytes)};
}

uint64_t PlannedSchedule::LeavingBytes() const {
  uint64_t bytes =
      WindowBytesWithout(residency_.ParcelOf(matcher_.used_last())) + residency_.DueAgainBytes();
  for (const auto& [next_access, parcel] : Unread()) bytes += parcel->size_bytes;
  return bytes;
}

bool PlannedSchedule::LacksBytesWithWeights() const {
  return IsPlanned() && MissingFor(awaited_bytes_).beyond_target_bytes > LeavingBytes();
}

PlannedSchedule::WeightsBeside PlannedSchedule::TakeWeightsBeside() {
  if (std::exchange(begins_unplanned_, false)) return {.most_bytes = 0, .unless_in_use = true};
  const uint64_t missing_bytes = IsPlanned() ? MissingFor(awaited_bytes_).most() : uint64_t{0};
  if (missing_bytes == 0) return {};
  return {.most_bytes = Beyond(missing_bytes, streamed_bytes_)};
}

// ---------------------------------------------------------------- what comes back, and stays

OffloadSchedule::Fetches PlannedSchedule::TakeFetches(
    const SavedPlace& from, int64_t backward,
    absl::FunctionRef<bool(const ScheduledParcel&)> is_away) {
  if (!IsPlanned()) {
    return options_.memory_bytes.has_value()
               ? Fetches()
               : OffloadSchedule::TakeFetches(from, backward, is_away);
  }
  return TakePlannedFetch(is_away);
}

OffloadSchedule::Fetches PlannedSchedule::TakePlannedFetch(
    absl::FunctionRef<bool(const ScheduledParcel&)> is_away) {
  Fetches taken;
  if (!MayFetch()) return taken;
  const size_t now = matcher_.now();
  for (; const StepMove* const move = cursor_.NextFetch(now); cursor_.PassFetch()) {
    const std::optional<uint32_t> id = matcher_.ObjectFor(move->object);
    if (id.has_value()) residency_.CountIfOverdue(*id, now);  // it may be resident again
    // A reader fetches what it reads now.
    if (!id.has_value() || move->read_at <= now || residency_.ParcelOf(*id) == nullptr) continue;
    ScheduledParcel& parcel = *residency_.ParcelOf(*id);
    ++taken.looks;
    if (parcel.scheduled.fetched_ahead || !is_away(parcel)) continue;
    if (MissingFor(parcel.size_bytes).bytes > 0)
      break;  // the device has more than planned: fetch later
    TakeFetch(parcel);
    taken.parcels.push_back(&parcel);
    cursor_.PassFetch();
    break;
  }
  return taken;
}

std::vector<ScheduledParcel*> PlannedSchedule::FetchedAhead() const {
  std::vector<ScheduledParcel*> parcels = OffloadSchedule::FetchedAhead();
  for (const uint32_t id : residency_.AllThatStayFetched()) {
    ScheduledParcel* const parcel = residency_.ParcelOf(id);
    if (!parcel->scheduled.fetched_ahead) parcels.push_back(parcel);
  }
  return parcels;
}

std::vector<ScheduledParcel*> PlannedSchedule::FetchedIn(int64_t backward) const {
  std::vector<ScheduledParcel*> parcels = OffloadSchedule::FetchedIn(backward);
  if (!IsPlanned()) return parcels;
  std::erase_if(parcels, [this](const ScheduledParcel* parcel) {
    return StaysFetched(*parcel) && IsResidentUntilNextAccess(parcel->objects.front());
  });
  // The plan may have fetched them for the next backward.
  const size_t now = matcher_.now();
  for (const StepMove& move : followed()->plan().moves) {
    const std::optional<uint32_t> id = matcher_.ObjectFor(move.object);
    if (!id.has_value() || move.fetch_at > now || move.read_at <= now) continue;
    std::erase(parcels, residency_.ParcelOf(*id));
  }
  return parcels;
}

}  // namespace pinion
