#include "pinion/engine/schedule/step_matcher.h"

#include <algorithm>
#include <utility>

#include "pinion/engine/planner/step_trace.h"

namespace pinion {

// -------------------------------------------------------------------------------- what it does

void StepProgress::Begin() {
  objects_.clear();
  signatures_.clear();
  unused_.clear();
  used_.clear();
  FollowNone();
}

StepProgress::Saved StepProgress::OnSaved(uint64_t signature) {
  if (unused_.empty()) {
    objects_.emplace_back();
    unused_.push_back(static_cast<uint32_t>(objects_.size() - 1));
  }
  const uint32_t id = unused_.back();
  unused_.pop_back();
  objects_[id] = {.signature = signature};
  ++live_objects_;
  const size_t before = signatures_[signature]++;
  if (known_ == nullptr) return {.object = id};
  const std::optional<uint32_t> planned = known_->Find(signature, before);
  if (!planned.has_value()) return {.object = id, .fits = false};
  objects_[id].planned = *planned;
  actual_[*planned] = id;
  return {.object = id};
}

bool StepProgress::OnUsed(uint32_t id, Use use) {
  Object& object = objects_[id];
  used_last_ = id;
  const size_t n = object.uses++;
  if (use == Use::kSaved) ++object.saves;
  if (known_ == nullptr) return true;
  used_.emplace_back(id, use);
  const std::optional<size_t> reached = Reached(*known_, actual_, object.planned, n, use, now_);
  if (!reached.has_value()) return false;
  skips_ = skips_ || *reached != used_.size() - 1;
  now_ = *reached;
  return !IsOverdue();
}

void StepProgress::OnReleased(uint32_t object) {
  // A step without a plan may be one that never ends: somebody keeps a graph for good.
  if (known_ == nullptr) unused_.push_back(object);
  objects_[object].is_live = false;
  --live_objects_;
}

bool StepProgress::IsOverdue() {
  const std::vector<uint32_t>& overs = known_->overs();
  for (; next_over_ < overs.size(); ++next_over_) {
    if (!known_->IsOverBy(overs[next_over_], now_)) return false;
    const uint32_t id = actual_[overs[next_over_]];
    if (id != UINT32_MAX && objects_[id].is_live) return true;
  }
  return false;
}

// ------------------------------------------------------------------------------ whom it follows

std::optional<size_t> StepProgress::Reached(const KnownStep& known,
                                            const std::vector<uint32_t>& actual, uint32_t planned,
                                            size_t n, Use use, size_t now) const {
  // What is saved may come in any order: branches leave some of it out.
  if (use == Use::kSaved) return std::max(now, known.Use(planned, n));
  const std::optional<size_t> next = known.NextRead(planned, now, use);
  for (size_t left_out = now + 1; left_out < next.value_or(0); ++left_out) {
    const uint32_t other = known.step().uses[left_out];
    if (actual[other] == UINT32_MAX) continue;
    // A branch that is left out reads nothing, but it saves nothing either.
    const Object& object = objects_[actual[other]];
    if (object.is_live && object.saves >= known.Saves(other)) return std::nullopt;
  }
  return next;
}

std::optional<StepProgress::Match> StepProgress::MatchWith(const KnownStep& known) const {
  Match match;
  match.actual.assign(known.step().objects.size(), UINT32_MAX);
  absl::flat_hash_map<uint64_t, size_t> seen;
  for (const Object& object : objects_) {
    const std::optional<uint32_t> found = known.Find(object.signature, seen[object.signature]++);
    if (!found.has_value()) return std::nullopt;
    match.actual[*found] = static_cast<uint32_t>(match.planned.size());
    match.planned.push_back(*found);
  }
  std::vector<size_t> uses(objects_.size());
  size_t so_far = 0;
  for (const auto& [object, use] : used_) {
    const std::optional<size_t> reached =
        Reached(known, match.actual, match.planned[object], uses[object]++, use, match.now);
    if (!reached.has_value()) return std::nullopt;
    match.skips = match.skips || *reached != so_far++;
    match.now = *reached;
  }
  for (size_t i = 0; i < objects_.size(); ++i) {
    if (objects_[i].is_live && known.IsOverBy(match.planned[i], match.now)) return std::nullopt;
  }
  return match;
}

void StepProgress::Follow(std::shared_ptr<const KnownStep> known, Match match) {
  FollowNone();
  known_ = std::move(known);
  now_ = match.now;
  skips_ = match.skips;
  actual_ = std::move(match.actual);
  for (size_t i = 0; i < objects_.size(); ++i) objects_[i].planned = match.planned[i];
}

void StepProgress::FollowNone() {
  known_ = nullptr;
  actual_.clear();
  now_ = next_over_ = 0;
  skips_ = false;
}

}  // namespace pinion
