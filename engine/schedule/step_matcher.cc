#include "pinion/engine/schedule/step_matcher.h"

#include <algorithm>
#include <utility>

#include "pinion/engine/planner/step_trace.h"

namespace pinion {

// -------------------------------------------------------------------------------- what it does

void StepMatcher::Begin() {
  objects_.clear();
  signatures_.clear();
  unused_.clear();
  used_.clear();
  FollowNone();
}

StepMatcher::Saved StepMatcher::OnSaved(uint64_t signature) {
  if (unused_.empty()) {
    objects_.emplace_back();
    unused_.push_back(static_cast<uint32_t>(objects_.size() - 1));
  }
  const uint32_t id = unused_.back();
  unused_.pop_back();
  objects_[id] = {.signature = signature};
  ++live_objects_;
  const size_t before = signatures_[signature]++;
  if (followed_ == nullptr) return {.object = id};
  const std::optional<uint32_t> planned = followed_->Find(signature, before);
  match_.planned.resize(objects_.size());
  if (!planned.has_value()) return {.object = id, .fits = false};
  match_.planned[id] = *planned;
  match_.actual[*planned] = id;
  return {.object = id};
}

bool StepMatcher::OnUsed(uint32_t id, AccessKind access) {
  Object& object = objects_[id];
  used_last_ = id;
  const size_t n = object.accesses++;
  if (access == AccessKind::kSaved) ++object.saves;
  if (followed_ == nullptr) return true;
  used_.emplace_back(id, access);
  const std::optional<size_t> reached =
      Reached(*followed_, match_.actual, match_.planned[id], n, access, match_.now);
  if (!reached.has_value()) return false;
  match_.skips = match_.skips || *reached != used_.size() - 1;
  match_.now = *reached;
  return !IsOverdue();
}

void StepMatcher::OnReleased(uint32_t object) {
  // A step without a plan may never end, if a graph is kept.
  if (followed_ == nullptr) unused_.push_back(object);
  objects_[object].is_live = false;
  --live_objects_;
}

bool StepMatcher::IsOverdue() {
  const std::vector<uint32_t>& overs = followed_->overs();
  for (; next_over_ < overs.size(); ++next_over_) {
    if (!followed_->IsOverBy(overs[next_over_], match_.now)) return false;
    const uint32_t id = match_.actual[overs[next_over_]];
    if (id != UINT32_MAX && objects_[id].is_live) return true;
  }
  return false;
}

// ------------------------------------------------------------------------------ whom it follows

std::optional<size_t> StepMatcher::Reached(const CachedPlan& cached,
                                           const std::vector<uint32_t>& actual, uint32_t planned,
                                           size_t n, AccessKind access, size_t now) const {
  // Saves may come in any order: branches leave some of them out.
  if (access == AccessKind::kSaved) return std::max(now, cached.AccessIndex(planned, n));
  const std::optional<size_t> next = cached.NextRead(planned, now, access);
  for (size_t left_out = now + 1; left_out < next.value_or(0); ++left_out) {
    const uint32_t other = cached.step().accesses[left_out];
    if (actual[other] == UINT32_MAX) continue;
    // A branch that is left out reads nothing, but it saves nothing either.
    const Object& object = objects_[actual[other]];
    if (object.is_live && object.saves >= cached.Saves(other)) return std::nullopt;
  }
  return next;
}

std::optional<StepMatcher::Match> StepMatcher::MatchWith(const CachedPlan& cached) const {
  Match match;
  match.actual.assign(cached.step().objects.size(), UINT32_MAX);
  absl::flat_hash_map<uint64_t, size_t> seen;
  for (const Object& object : objects_) {
    const std::optional<uint32_t> found = cached.Find(object.signature, seen[object.signature]++);
    if (!found.has_value()) return std::nullopt;
    match.actual[*found] = static_cast<uint32_t>(match.planned.size());
    match.planned.push_back(*found);
  }
  std::vector<size_t> accesses(objects_.size());
  size_t so_far = 0;
  for (const auto& [object, access] : used_) {
    const std::optional<size_t> reached =
        Reached(cached, match.actual, match.planned[object], accesses[object]++, access, match.now);
    if (!reached.has_value()) return std::nullopt;
    match.skips = match.skips || *reached != so_far++;
    match.now = *reached;
  }
  for (size_t i = 0; i < objects_.size(); ++i) {
    if (objects_[i].is_live && cached.IsOverBy(match.planned[i], match.now)) return std::nullopt;
  }
  return match;
}

void StepMatcher::Follow(std::shared_ptr<const CachedPlan> cached, Match match) {
  FollowNone();
  followed_ = std::move(cached);
  match_ = std::move(match);
}

void StepMatcher::FollowNone() {
  followed_ = nullptr;
  match_ = {};
  next_over_ = 0;
}

}  // namespace pinion
