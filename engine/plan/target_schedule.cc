#include "pinion/engine/plan/target_schedule.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "pinion/engine/plan/pack_plan.h"
#include "pinion/engine/plan/step_plan.h"

namespace pinion {
namespace {

// With a target, no window counts but what this schedule asks for by itself.
WindowOptions WindowsOf(const TargetOptions& options) {
  WindowOptions windows = options.windows;
  if (options.memory_bytes.has_value()) windows.eviction_bytes = windows.prefetch_bytes = 0;
  return windows;
}

}  // namespace

TargetSchedule::TargetSchedule(const TargetOptions& options)
    : options_(options),
      small_bytes_(LargestSmallPiece(options.link)),
      window_(WindowsOf(options)) {}

// --------------------------------------------------------------------------------- known steps

bool TargetSchedule::WantsRecord() const {
  if (known_steps_ >= kKnownInARow) {
    return known_steps_ < kKnownInARowForMixes && known_.AnyWantsMix();
  }
  // The longer no step has been known, the more are let pass before one is recorded: a program
  // whose steps are never alike has kMaxKnown of them recorded while their number doubles.
  const uint64_t every = std::bit_floor((unknown_steps_ / kMaxKnown) | 1);
  return unknown_steps_ % every == 0;
}

std::optional<size_t> TargetSchedule::Reached(const KnownStep& known,
                                              const std::vector<uint32_t>& actual, uint32_t planned,
                                              size_t n, Use use, size_t now) const {
  // What is saved may come in any order: branches leave some of it out.
  if (use == Use::kSaved) return std::max(now, known.Use(planned, n));
  const std::optional<size_t> next = known.NextRead(planned, now, use == Use::kReadAndKept);
  for (size_t left_out = now + 1; left_out < next.value_or(0); ++left_out) {
    const uint32_t other = known.step().uses[left_out];
    if (actual[other] == UINT32_MAX) continue;
    // A branch that is left out reads nothing, but it saves nothing either.
    const Object& object = objects_[actual[other]];
    if (object.is_live && object.saves >= known.Saves(other)) return std::nullopt;
  }
  return next;
}

std::optional<TargetSchedule::Begun> TargetSchedule::Match(const KnownStep& known) const {
  if (!segments_.Fits(known)) return std::nullopt;
  Begun begun;
  begun.actual.assign(known.step().objects.size(), UINT32_MAX);
  absl::flat_hash_map<uint64_t, size_t> seen;
  for (const Object& object : objects_) {
    const std::optional<uint32_t> found = known.Find(object.signature, seen[object.signature]++);
    if (!found.has_value()) return std::nullopt;
    begun.actual[*found] = static_cast<uint32_t>(begun.planned.size());
    begun.planned.push_back(*found);
  }
  std::vector<size_t> uses(objects_.size());
  for (const auto& [object, use] : used_) {
    const std::optional<size_t> reached =
        Reached(known, begun.actual, begun.planned[object], uses[object]++, use, begun.now);
    if (!reached.has_value()) return std::nullopt;
    begun.now = *reached;
  }
  for (size_t i = 0; i < objects_.size(); ++i) {
    if (objects_[i].is_live && known.IsOverBy(begun.planned[i], begun.now)) return std::nullopt;
  }
  return begun;
}

void TargetSchedule::FindKnown(bool begins) {
  std::optional<Begun> begun;
  const auto find = [&](bool fits) {
    return known_.Find([&](const KnownStep& known) {
      if (known.shortfall().ok() == fits) begun = Match(known);
      return begun.has_value();
    });
  };
  std::shared_ptr<const KnownStep> found = find(/*fits=*/true);
  if (found == nullptr) found = find(/*fits=*/false);
  now_known_ = nullptr;
  actual_.clear();
  due_.clear();
  now_ = next_copy_ = next_drop_ = next_fetch_ = next_over_ = 0;
  looked_at_ = SIZE_MAX;
  has_late_ = true;
  for (Object& object : objects_) {
    object.away_until = 0;
    CountAsOverdue(object, false);
  }
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
    // What has come back goes once more.
    for (const Object& object : objects_) {
      if (object.parcel != nullptr) due_.push_back(object.parcel);
    }
    return;
  }
  now_known_ = std::move(found);
  now_ = begun->now;
  actual_ = std::move(begun->actual);
  for (size_t i = 0; i < objects_.size(); ++i) objects_[i].planned = begun->planned[i];
}

std::optional<uint32_t> TargetSchedule::OnSegment(ScopeId scope) {
  if (IsInStep()) return segments_.OnSegment();
  if (!segments_.has_early()) early_scope_ = scope;
  // What ran last is likely to come again.
  const auto& all = known_.all();
  const auto fits = std::find_if(all.begin(), all.end(),
                                 [](const auto& known) { return known->shortfall().ok(); });
  return segments_.OnEarlySegment(fits == all.end() ? nullptr : *fits, is_recorded_, known_);
}

// ------------------------------------------------------------------------------ what happens

Fate TargetSchedule::OnSaved(ScopeId scope, const SavedObject& saved) {
  window_.OnSaved(scope, saved);
  const bool begins = live_objects_++ == 0;
  if (begins) {
    objects_.clear();
    signatures_.clear();
    unused_.clear();
    used_.clear();
    known_.OnBegin();
    segments_.OnBegin(saved.signature);
  }
  const uint32_t id = NewObject(saved);
  const size_t before = signatures_[saved.signature]++;
  if (begins) {
    FindKnown(/*begins=*/true);
  } else if (IsPlanned()) {
    const std::optional<uint32_t> planned = now_known_->Find(saved.signature, before);
    if (planned.has_value()) {
      objects_[id].planned = *planned;
      actual_[*planned] = id;
    } else {
      FindKnown(/*begins=*/false);
    }
  }
  OnUsed(id, Use::kSaved);
  objects_[id].stays = IsPlanned() && now_known_->Stays(objects_[id].planned, now_);
  return {.object = id, .leaves = !objects_[id].stays};
}

uint64_t TargetSchedule::CompanyOf(uint32_t id) const {
  // What is large shares no parcel anyhow, but what leaves together has left when all of it has.
  const bool is_large = objects_[id].size_bytes > small_bytes_;
  const bool is_alone = !is_large && options_.memory_bytes.has_value();
  if (!IsPlanned()) return is_alone ? KnownStep::AloneCompany(id) : 0;
  const uint32_t planned = objects_[id].planned;
  return is_large ? now_known_->LargeCompany(planned) : now_known_->Company(planned);
}

void TargetSchedule::OnUsed(uint32_t id, Use use) {
  Object& object = objects_[id];
  used_last_ = id;
  const size_t n = object.uses++;
  if (use == Use::kSaved) ++object.saves;
  if (IsPlanned()) {
    used_.emplace_back(id, use);
    const std::optional<size_t> reached =
        Reached(*now_known_, actual_, object.planned, n, use, now_);
    if (reached.has_value()) now_ = *reached;
    if (!reached.has_value() || IsOverdue()) FindKnown(/*begins=*/false);
  }
  object.stays_fetched = use == Use::kReadAndKept && IsPlanned() &&
                         now_known_->IsHereUntilNextUse(object.planned, now_);
  const ScheduledParcel* parcel = object.parcel;
  const bool is_away = parcel != nullptr && !parcel->scheduled.in_window && !object.is_fetched;
  awaited_bytes_ = is_away ? parcel->size_bytes : 0;
}

bool TargetSchedule::IsOverdue() {
  const std::vector<uint32_t>& overs = now_known_->overs();
  for (; next_over_ < overs.size(); ++next_over_) {
    if (!now_known_->IsOverBy(overs[next_over_], now_)) return false;
    const uint32_t id = actual_[overs[next_over_]];
    if (id != UINT32_MAX && objects_[id].is_live) return true;
  }
  return false;
}

uint32_t TargetSchedule::NewObject(const SavedObject& saved) {
  if (unused_.empty()) {
    objects_.emplace_back();
    unused_.push_back(static_cast<uint32_t>(objects_.size() - 1));
  }
  const uint32_t id = unused_.back();
  unused_.pop_back();
  objects_[id] = {.signature = saved.signature, .size_bytes = saved.size_bytes};
  return id;
}

void TargetSchedule::OnReleased(uint32_t object) {
  // A step without a plan may be one that never ends: somebody keeps a graph for good.
  if (!IsPlanned()) unused_.push_back(object);
  objects_[object].is_live = objects_[object].stays = objects_[object].stays_fetched = false;
  objects_[object].parcel = nullptr;
  CountAsOverdue(objects_[object], false);
  if (--live_objects_ > 0) return;
  known_.OnEnd(now_known_.get());
  // What tries a mix is most likely the step that was known.
  const bool is_unknown = is_lost_ && !segments_.IsTrying();
  known_steps_ = is_unknown ? 0 : std::min(known_steps_ + 1, kKnownInARowForMixes);
  unknown_steps_ = is_unknown ? unknown_steps_ + 1 : 0;
}

std::vector<uint32_t> TargetSchedule::TakeLateLeavers() {
  std::vector<uint32_t> late;
  const auto leave = [&](uint32_t id) {
    if (std::exchange(objects_[id].stays, false)) late.push_back(id);
  };
  if (std::exchange(has_late_, false)) {
    for (uint32_t id = 0; id < objects_.size(); ++id) {
      if (!IsPlanned() || !now_known_->Stays(objects_[id].planned, now_)) leave(id);
    }
  }
  if (!IsPlanned()) return late;
  const bool all_leave = std::exchange(all_leave_, false);
  const std::vector<uint32_t>& copies = now_known_->late_copies();
  for (size_t i = next_copy_; i < copies.size(); ++i) {
    const StepMove& move = now_known_->plan().moves[copies[i]];
    if (move.copy_at <= now_) {
      next_copy_ = i + 1;
    } else if (!all_leave) {
      break;
    }
    if (actual_[move.object] != UINT32_MAX) leave(actual_[move.object]);
  }
  return late;
}

void TargetSchedule::OnLeft(ScheduledParcel& parcel, absl::Span<const HeldBytes> held) {
  window_.OnLeft(parcel, held);
  bool is_due = false;
  for (const uint32_t object : parcel.objects) {
    objects_[object].parcel = &parcel;
    CountIfOverdue(objects_[object]);
    is_due = is_due || objects_[object].IsToBeAway(now_);
  }
  if (is_due) due_.push_back(&parcel);
}

void TargetSchedule::OnFetched(ScheduledParcel& parcel, int64_t backward) {
  for (const uint32_t object : parcel.objects) {
    objects_[object].is_fetched = true;
    objects_[object].is_held = false;
  }
  awaited_bytes_ = 0;
  std::erase(due_, &parcel);
  // Its reader has it, and the next one may be far away.
  if (!IsPlanned() && options_.memory_bytes.has_value()) due_.push_back(&parcel);
  window_.OnFetched(parcel, backward);
}

bool TargetSchedule::OnDropped(ScheduledParcel& parcel) {
  for (const uint32_t object : parcel.objects) {
    objects_[object].is_fetched = objects_[object].stays_fetched = false;
  }
  return window_.OnDropped(parcel);
}

bool TargetSchedule::OnGone(ScheduledParcel& parcel) {
  for (const uint32_t object : parcel.objects) objects_[object].parcel = nullptr;
  std::erase(due_, &parcel);
  return window_.OnGone(parcel);
}

void TargetSchedule::OnFetchesRefused(absl::Span<ScheduledParcel* const> parcels) {
  window_.OnFetchesRefused(parcels);
  next_fetch_ = 0;
}

void TargetSchedule::OnRoomWanted() {
  window_.OnRoomWanted();
  next_fetch_ = 0;
}

// ------------------------------------------------------------------------------------ what to do

ScheduledParcels TargetSchedule::TakeEvictions() {
  if (!IsPlanned() && !options_.memory_bytes.has_value()) return window_.TakeEvictions();
  ScheduledParcels taken;
  if (!IsPlanned()) {
    taken = window_.TakeDownTo(0);
    for (ScheduledParcel* parcel : std::exchange(due_, {})) {
      if (!IsFetchedAlone(*parcel)) continue;
      // One reader after another has saved the same: it would come back at once, beside what the
      // one before still has.
      if (parcel->objects.front() == used_last_) {
        due_.push_back(parcel);
      } else {
        taken.push_back(parcel);
      }
    }
    return taken;
  }
  const std::vector<StepMove>& moves = now_known_->plan().moves;
  const std::vector<uint32_t>& drops = now_known_->drops();
  for (; next_drop_ < drops.size() && moves[drops[next_drop_]].drop_at <= now_; ++next_drop_) {
    const StepMove& move = moves[drops[next_drop_]];
    const uint32_t id = actual_[move.object];
    // Uses that were left out may lie between: by now it is to be back.
    if (id == UINT32_MAX || move.fetch_at <= now_) continue;
    objects_[id].away_until = move.fetch_at;
    if (objects_[id].parcel != nullptr) due_.push_back(objects_[id].parcel);
    CountIfOverdue(objects_[id]);
  }
  for (ScheduledParcel* parcel : std::exchange(due_, {})) {
    if (window_.Take(*parcel) || IsFetchedAlone(*parcel)) taken.push_back(parcel);
  }
  if (!taken.empty()) return taken;
  // Once for each use: what somebody still holds frees nothing yet, and others would go in vain.
  if (std::exchange(looked_at_, now_) == now_) return taken;
  const uint64_t missing_bytes = MissingBytes(awaited_bytes_);
  const uint64_t window_bytes = window_.window_bytes();
  const uint64_t beyond_bytes = missing_bytes - std::min(window_bytes, missing_bytes);
  if (beyond_bytes > 0) all_leave_ = true;
  taken = window_.TakeDownTo(window_bytes - std::min(window_bytes, missing_bytes));
  for (ScheduledParcel* parcel : TakeStayedFor(beyond_bytes)) taken.push_back(parcel);
  return taken;
}

uint64_t TargetSchedule::MissingBytes(uint64_t more_bytes) const {
  if (!options_.memory_bytes.has_value()) return 0;
  const uint64_t wanted_bytes = device_bytes_ + now_known_->GrowthBytes(now_) + more_bytes;
  return wanted_bytes - std::min(wanted_bytes, *options_.memory_bytes);
}

}  // namespace pinion
