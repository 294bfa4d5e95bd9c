#include "pinion/engine/schedule/weight_prefetcher.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <utility>

namespace pinion {
namespace {

uint64_t BytesOf(const std::vector<SizedObject>& objects) {
  uint64_t bytes = 0;
  for (const SizedObject& sized : objects) bytes += sized.size_bytes;
  return bytes;
}

// Chooses as many objects as fit in `most_bytes`. An object is chosen where its predecessors have
// left enough of an even share.
std::vector<SizedObject> ChooseShare(const std::vector<SizedObject>& round, uint64_t most_bytes) {
  const double share = static_cast<double>(most_bytes) / static_cast<double>(BytesOf(round));
  std::vector<SizedObject> chosen;
  double seen_bytes = 0;
  uint64_t chosen_bytes = 0;
  for (const SizedObject& sized : round) {
    seen_bytes += static_cast<double>(sized.size_bytes);
    const double room_bytes = std::round(seen_bytes * share) - static_cast<double>(chosen_bytes);
    if (room_bytes < static_cast<double>(sized.size_bytes)) continue;
    chosen.push_back(sized);
    chosen_bytes += sized.size_bytes;
  }
  return chosen;
}

// Chooses as many of the round's objects as fit in `most_bytes`, spread over the round.
std::vector<SizedObject> Spread(const std::vector<SizedObject>& round, uint64_t most_bytes) {
  const std::vector<SizedObject> first = ChooseShare(round, most_bytes);
  // A share without the bytes that no object fills spreads better: two streamed objects in a row
  // would use them up.
  const std::vector<SizedObject> even = ChooseShare(round, BytesOf(first));
  return BytesOf(even) == BytesOf(first) ? even : first;
}

// Chooses what stays. The window keeps room for the two largest objects: one is used while the
// other is fetched. Exception: objects much larger than the rest, such as an embedding and a head,
// stay, and the room is for three of the rest, if that room is smaller. With room for two, fetches
// of streamed objects that lie close together would be late.
std::vector<SizedObject> ChooseWhatStays(const std::vector<SizedObject>& round,
                                         uint64_t window_bytes) {
  std::vector<uint64_t> sizes;
  for (const SizedObject& sized : round) sizes.push_back(sized.size_bytes);
  std::sort(sizes.begin(), sizes.end(), std::greater<>());
  uint64_t room_bytes = sizes[0] + (sizes.size() > 1 ? sizes[1] : 0);
  uint64_t least_large_bytes = UINT64_MAX;  // from this size on all objects stay
  uint64_t large_bytes = 0;                 // of these objects together
  uint64_t sum_bytes = 0;
  for (size_t count = 1; count + 2 < sizes.size(); ++count) {
    sum_bytes += sizes[count - 1];
    const uint64_t three_bytes = sizes[count] + sizes[count + 1] + sizes[count + 2];
    if (sum_bytes + three_bytes >= window_bytes) break;
    if (sizes[count - 1] == sizes[count] || three_bytes >= room_bytes) continue;
    least_large_bytes = sizes[count - 1];
    large_bytes = sum_bytes;
    room_bytes = three_bytes;
  }
  if (window_bytes <= room_bytes + large_bytes) return {};
  std::vector<SizedObject> stay, rest;
  for (const SizedObject& sized : round) {
    (sized.size_bytes >= least_large_bytes ? stay : rest).push_back(sized);
  }
  const std::vector<SizedObject> spread = Spread(rest, window_bytes - room_bytes - large_bytes);
  stay.insert(stay.end(), spread.begin(), spread.end());
  return stay;
}

LoopPlan LoopOf(const std::vector<SizedObject>& stay, uint64_t most_ahead_bytes = UINT64_MAX) {
  LoopPlan loop = {.stay = {}, .most_ahead_bytes = most_ahead_bytes};
  for (const SizedObject& sized : stay) loop.stay.push_back(sized.object);
  return loop;
}

constexpr uint64_t kNever = UINT64_MAX;

// How many rows up to the last one must be the same for a prediction, and how many are compared to
// find the best place.
constexpr size_t kLeastMemory = 2;
constexpr size_t kMostMemory = 64;

// Rows: several steps of thousands of layers.
constexpr size_t kHistory = size_t{1} << 16;

// Later uses share the last place: a model of a single layer is used without end.
constexpr uint64_t kMostUses = 63;

}  // namespace

LoopPlan PlanLoop(const std::vector<SizedObject>& round, uint64_t window_bytes) {
  const uint64_t round_bytes = BytesOf(round);
  if (round_bytes <= window_bytes) return {};
  const std::vector<SizedObject> stay = ChooseWhatStays(round, window_bytes);
  const uint64_t largest_bytes =
      std::max_element(round.begin(), round.end(), [](const SizedObject& a, const SizedObject& b) {
        return a.size_bytes < b.size_bytes;
      })->size_bytes;
  // To move on, objects of about one size take turns. At least half of them are resident beside
  // two: otherwise streamed objects would be neighbours, with the time of one use for each copy.
  const bool may_move_on = 5 * largest_bytes * round.size() <= 6 * round_bytes &&
                           2 * window_bytes >= round_bytes + 4 * largest_bytes;
  if (!may_move_on) return LoopOf(stay);
  const std::vector<SizedObject> first = Spread(round, window_bytes - largest_bytes);
  const uint64_t streamed_bytes = round_bytes - BytesOf(first);
  // One in so many objects is streamed, and is fetched as many uses ahead.
  const uint64_t uses_ahead = (round_bytes + streamed_bytes - 1) / streamed_bytes;
  const uint64_t ahead_bytes = (uses_ahead + 1) * largest_bytes;
  if (ahead_bytes >= round_bytes) return LoopOf(stay);
  // An object is resident from its fetch, `uses_ahead` uses ahead, until it is evicted.
  const double fetched_bytes = static_cast<double>(round_bytes) *
                               static_cast<double>(streamed_bytes - largest_bytes) /
                               static_cast<double>(round_bytes - ahead_bytes);
  const bool fetches_less = fetched_bytes < static_cast<double>(round_bytes - BytesOf(stay));
  return fetches_less ? LoopOf(first, ahead_bytes) : LoopOf(stay);
}

WeightPrefetcher::WeightPrefetcher(PrefetchLimits limits) : window_bytes_(limits.window_bytes) {
  for (const uint64_t size_bytes : limits.sizes_bytes) {
    objects_.push_back({.size_bytes = size_bytes});
  }
  objects_.push_back({.size_bytes = 0});
}

PrefetchPlan WeightPrefetcher::OnUse(uint32_t object, absl::FunctionRef<bool(uint32_t)> may_evict) {
  PrefetchPlan plan;
  const bool is_same = !history_.empty() && history_.back().object == object;
  if (!is_same) Remember(object);
  ++history_.back().uses;
  history_.back().window_bytes = std::min(history_.back().window_bytes, window_bytes_);
  const bool is_resident = objects_[object].is_resident;
  const bool goes_on = is_same && is_resident;
  if (goes_on && resident_bytes_ <= window_bytes_) return plan;
  objects_[object].last_use = ++uses_;
  // Objects in use on other threads may leave no room: then residents exceed the window.
  MakeRoom(is_resident ? 0 : objects_[object].size_bytes, 0, object, may_evict, plan);
  if (!is_resident) {
    OnFetched(object);
    plan.fetches.push_back(object);
  }
  if (!goes_on) FetchAhead(object, may_evict, plan);
  return plan;
}

PrefetchPlan WeightPrefetcher::OnUsed(uint32_t object,
                                      absl::FunctionRef<bool(uint32_t)> may_evict) {
  PrefetchPlan plan;
  MakeRoom(0, 0, change(), may_evict, plan);
  const bool is_last = match_.has_value() && history_.back().object == object &&
                       history_.back().uses == history_[*match_].uses;
  if (is_last) FetchAhead(change(), may_evict, plan);
  return plan;
}

PrefetchPlan WeightPrefetcher::OnChange(absl::FunctionRef<bool(uint32_t)> may_evict) {
  PrefetchPlan plan;
  if (history_.empty() || history_.back().object != change()) Remember(change());
  FetchAhead(change(), may_evict, plan);
  return plan;
}

void WeightPrefetcher::FetchAhead(uint32_t in_use, absl::FunctionRef<bool(uint32_t)> may_evict,
                                  PrefetchPlan& plan) {
  if (!match_.has_value()) return;
  uint64_t needed_bytes = stay_bytes_ + (objects_[in_use].stays ? 0 : objects_[in_use].size_bytes);
  uint64_t most_bytes = window_bytes_;
  if (stay_bytes_ == 0) most_bytes = std::min(most_bytes, loop_.most_ahead_bytes);
  for (size_t ahead = 1; ahead < period(); ++ahead) {
    const uint32_t next = ExpectedAt(ahead).object;
    if (next == change()) return;
    most_bytes = std::min(most_bytes, ExpectedAt(ahead).window_bytes);
    const bool is_counted = next == in_use || objects_[next].next_row != rows_ + ahead;
    if (is_counted) continue;
    if (!objects_[next].stays) needed_bytes += objects_[next].size_bytes;
    if (needed_bytes > most_bytes) return;
    if (objects_[next].is_resident) continue;
    if (!MakeRoom(objects_[next].size_bytes, ahead, in_use, may_evict, plan)) return;
    OnFetched(next);
    plan.fetches.push_back(next);
  }
}

void WeightPrefetcher::OnEvicted(uint32_t object) {
  if (!std::exchange(objects_[object].is_resident, false)) return;
  resident_bytes_ -= objects_[object].size_bytes;
}

void WeightPrefetcher::OnFetched(uint32_t object) {
  if (std::exchange(objects_[object].is_resident, true)) return;
  resident_bytes_ += objects_[object].size_bytes;
}

void WeightPrefetcher::Remember(uint32_t object) {
  if (history_.size() == 2 * kHistory) {
    history_.erase(history_.begin(), history_.begin() + kHistory);
    match_ = match_.has_value() && *match_ >= kHistory ? std::optional(*match_ - kHistory)
                                                       : std::nullopt;
  }
  const bool is_expected = match_.has_value() && ExpectedAt(1).object == object;
  history_.push_back({.object = object, .uses = 0, .window_bytes = window_bytes_});
  ++rows_;
  const size_t period_before = is_expected ? period() - 1 : 0;
  // Of places with equally many rows in common the most recent one predicts best.
  const bool is_looked_for = !is_expected || (expected_uses_ + 1) % kMostMemory == 0;
  match_ = is_looked_for ? FindSameUses() : std::optional(*match_ + 1);
  if (!match_.has_value() || period() != period_before) {
    FindNextRows();
    expected_uses_ = 0;
    Begin({});
    return;
  }
  // The prediction of all other objects' rows still holds.
  size_t ahead = 1;
  while (history_[*match_ + ahead].object != object) ++ahead;
  objects_[object].next_row = rows_ + ahead;
  if (++expected_uses_ % period() == 0) ChooseLoop();
}

std::optional<size_t> WeightPrefetcher::FindSameUses() const {
  const size_t last = history_.size() - 1;
  std::optional<size_t> best;
  size_t best_length = kLeastMemory - 1;
  for (size_t end = last; end-- > 0 && best_length < kMostMemory;) {
    size_t length = 0;
    while (length <= end && length < kMostMemory &&
           history_[end - length].object == history_[last - length].object) {
      ++length;
    }
    if (length <= best_length) continue;
    best_length = length;
    best = end;
  }
  return best;
}

// The rows since the match repeat for ever.
const WeightPrefetcher::Row& WeightPrefetcher::ExpectedAt(size_t uses_from_now) const {
  return history_[*match_ + 1 + (uses_from_now - 1) % period()];
}

void WeightPrefetcher::FindNextRows() {
  for (Object& object : objects_) object.next_row = kNever;
  if (!match_.has_value()) return;
  for (size_t ahead = period(); ahead > 0; --ahead) {
    objects_[ExpectedAt(ahead).object].next_row = rows_ + ahead;
  }
}

bool WeightPrefetcher::MakeRoom(uint64_t size_bytes, size_t uses_from_now, uint32_t in_use,
                                absl::FunctionRef<bool(uint32_t)> may_evict, PrefetchPlan& plan) {
  if (resident_bytes_ + size_bytes <= window_bytes_) return true;
  const uint64_t excess_bytes = resident_bytes_ + size_bytes - window_bytes_;
  std::vector<uint32_t> candidates;
  for (uint32_t number = 0; number < objects_.size(); ++number) {
    const Object& object = objects_[number];
    const bool is_fetched_just_now =
        std::find(plan.fetches.begin(), plan.fetches.end(), number) != plan.fetches.end();
    const bool may_go = !object.stays || uses_from_now == 0;
    if (object.is_resident && may_go && number != in_use && !is_fetched_just_now &&
        object.next_row > rows_ + uses_from_now && may_evict(number)) {
      candidates.push_back(number);
    }
  }
  // A heap: most often a single candidate of many is dropped.
  const auto goes_later = [this](uint32_t a, uint32_t b) {
    if (objects_[a].stays != objects_[b].stays) return objects_[a].stays;
    if (objects_[a].next_row != objects_[b].next_row) {
      return objects_[a].next_row < objects_[b].next_row;
    }
    return objects_[a].last_use > objects_[b].last_use;
  };
  std::make_heap(candidates.begin(), candidates.end(), goes_later);
  auto first_drop = candidates.end();  // evictions lie from here on, the first one last
  uint64_t freed_bytes = 0;
  while (freed_bytes < excess_bytes && first_drop != candidates.begin()) {
    std::pop_heap(candidates.begin(), first_drop, goes_later);
    freed_bytes += objects_[*--first_drop].size_bytes;
  }
  const bool is_ahead = uses_from_now > 0;
  if (is_ahead && freed_bytes < excess_bytes) return false;
  for (auto drop = candidates.end(); drop != first_drop;) {
    OnEvicted(*--drop);
    plan.evictions.push_back(*drop);
  }
  return freed_bytes >= excess_bytes;
}

void WeightPrefetcher::ChooseLoop() {
  std::vector<SizedObject> round;  // each object once, in the order of first uses
  std::vector<bool> is_in_round(objects_.size());
  uint64_t window_bytes = UINT64_MAX;  // the smallest of the round
  for (size_t ahead = 1; ahead <= period(); ++ahead) {
    const uint32_t object = ExpectedAt(ahead).object;
    if (object == change()) return;  // evicts all objects, including those that would stay
    window_bytes = std::min(window_bytes, ExpectedAt(ahead).window_bytes);
    if (is_in_round[object]) continue;
    is_in_round[object] = true;
    round.push_back({object, objects_[object].size_bytes});
  }
  // Forward and backward use most objects twice a round, and find as much resident at their turns.
  if (2 * period() >= 3 * round.size()) return;
  LoopPlan loop = PlanLoop(round, window_bytes);
  if (loop != loop_) {
    Begin(std::move(loop));
  } else if (loop_.moves_on()) {
    SetWhatStays({});
  }
}

void WeightPrefetcher::Begin(LoopPlan loop) {
  loop_ = std::move(loop);
  SetWhatStays(loop_.stay);
}

void WeightPrefetcher::SetWhatStays(const std::vector<uint32_t>& objects) {
  for (Object& object : objects_) object.stays = false;
  stay_bytes_ = 0;
  for (const uint32_t object : objects) {
    objects_[object].stays = true;
    stay_bytes_ += objects_[object].size_bytes;
  }
}

WindowPredictor::Place WindowPredictor::PlaceOf(const WeightUse& use) {
  if (std::exchange(in_backward_, use.in_backward) && !use.in_backward) uses_.clear();
  const Place first = {use.object, (use.builds_graph ? 2 : 0) | (use.in_backward ? 1 : 0)};
  uint64_t& uses = uses_[first];
  const bool is_in_row = last_.has_value() && last_->place.first == use.object;
  const bool has_end = use.builds_graph || use.in_backward;
  if (!has_end && !is_in_row) uses = 0;
  return {use.object, first.second | std::min(uses++, kMostUses) << 2};
}

uint64_t WindowPredictor::AtUse(const WeightUse& use, const OthersBytes& others,
                                const std::optional<PeakBound>& peak_bound) {
  const Place place = PlaceOf(use);
  NoteLast(others);
  last_ = {place, use.argument_bytes, others};
  const auto known = known_.find(place);
  if (known == known_.end() || use.argument_bytes > known->second.argument_bytes) return 0;
  uint64_t taken_bytes = others.current + known->second.allocated_bytes;
  if (peak_bound.has_value()) {
    taken_bytes =
        peak_bound->moves ? peak_bound->most_bytes : std::min(taken_bytes, peak_bound->most_bytes);
    taken_bytes = std::max(taken_bytes, others.current);
  }
  return target_bytes_ - std::min(target_bytes_, taken_bytes);
}

void WindowPredictor::NoteLast(const OthersBytes& others) {
  if (!last_.has_value()) return;
  // The allocator's counts were reset: the allocations since the last use are unknown.
  if (others.allocated < last_->others.allocated) {
    known_.erase(last_->place);
    return;
  }
  Known& known = known_[last_->place];
  known.argument_bytes = std::max(known.argument_bytes, last_->argument_bytes);
  known.allocated_bytes =
      std::max(known.allocated_bytes, others.allocated - last_->others.allocated);
}

}  // namespace pinion
