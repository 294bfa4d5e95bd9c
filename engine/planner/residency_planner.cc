#include "pinion/engine/planner/residency_planner.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <optional>
#include <queue>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "pinion/engine/planner/liveness.h"

namespace pinion {
namespace {

// Indices of the idle intervals of objects that are resident now.
class EvictionCandidates {
 public:
  // The highest rank is evicted first; of equal ranks the earliest, whose copy is done first.
  EvictionCandidates(const std::vector<IdleInterval>& idle_intervals,
                     const std::vector<uint32_t>& ranks, EvictionRule rule)
      : idle_intervals_(idle_intervals),
        ranks_(ranks),
        rule_(rule),
        is_idle_(idle_intervals.size()) {}

  void Add(size_t idle) {
    is_idle_[idle] = true;
    by_rank_.emplace(ranks_[idle], -static_cast<int64_t>(idle));
    if (rule_ == EvictionRule::kFitting) by_size_.insert(BySize(idle));
  }
  void Remove(size_t idle) {
    is_idle_[idle] = false;
    if (rule_ == EvictionRule::kFitting) by_size_.erase(BySize(idle));
  }
  // Chooses one to evict where the memory exceeds the limit by `excess_bytes`. There is at least
  // one.
  size_t Choose(int64_t excess_bytes) {
    while (!is_idle_[-by_rank_.top().second]) by_rank_.pop();
    const auto highest = static_cast<size_t>(-by_rank_.top().second);
    if (rule_ == EvictionRule::kHighest) return highest;
    const auto smallest = by_size_.lower_bound({excess_bytes, 0, 0});
    if (smallest == by_size_.end()) return highest;
    return std::get<2>(
        *std::prev(by_size_.upper_bound({std::get<0>(*smallest), UINT32_MAX, SIZE_MAX})));
  }

 private:
  std::tuple<int64_t, uint32_t, size_t> BySize(size_t idle) const {
    return {idle_intervals_[idle].size_bytes, ranks_[idle], idle};
  }

  const std::vector<IdleInterval>& idle_intervals_;
  const std::vector<uint32_t>& ranks_;
  const EvictionRule rule_;
  std::vector<bool> is_idle_;
  std::priority_queue<std::pair<uint32_t, int64_t>> by_rank_;  // may contain removed ones
  absl::btree_set<std::tuple<int64_t, uint32_t, size_t>> by_size_;
};

// Indices of `idle_intervals`, sorted by `key`.
template <typename Key>
std::vector<size_t> OrderOf(const std::vector<IdleInterval>& idle_intervals, Key key) {
  std::vector<size_t> order(idle_intervals.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return key(idle_intervals[a]) < key(idle_intervals[b]);
  });
  return order;
}

// Orders offloaded intervals by the access that reads them, recasts last.
bool IsPrefetchedBefore(const IdleInterval* a, const IdleInterval* b) {
  return std::tuple(a->is_recast, a->read_at, a->object) <
         std::tuple(b->is_recast, b->read_at, b->object);
}

// Delays evictions as long as the memory allows, latest evictions first. An object that fits in all
// of its idle interval stays.
void DelayEvictions(int64_t limit_bytes, std::vector<IdleInterval*>& offloaded,
                    RangeMaxTree& used) {
  std::sort(offloaded.begin(), offloaded.end(), [](const IdleInterval* a, const IdleInterval* b) {
    return std::tuple(a->is_recast, b->object, b->first) <
           std::tuple(b->is_recast, a->object, a->first);
  });
  std::erase_if(offloaded, [&](IdleInterval* idle) {
    const std::optional<size_t> full = used.FirstAbove(idle->first, limit_bytes - idle->size_bytes);
    const size_t leaves = std::min(full.value_or(IdleInterval::kStays), idle->offloaded_by);
    const bool stays = leaves > idle->last;
    if (idle->is_recast && !stays) return false;
    used.Add(idle->first, stays ? idle->last : leaves - 1, idle->size_bytes);
    idle->offloaded_from = stays ? IdleInterval::kStays : leaves;
    return stays;
  });
}

}  // namespace

std::vector<IdleInterval> IdleIntervalsOf(const StepTrace& step) {
  const std::vector<ObjectLiveness> lives = LivenessOf(step);
  const std::vector<size_t> operator_ends = OperatorEnds(step);
  std::vector<IdleInterval> idle_intervals;
  for (size_t index = 0; index < lives.size(); ++index) {
    const StepObject& object = step.objects[index];
    const ObjectLiveness& life = lives[index];
    // Memory that evicting does not free is among the other bytes.
    if (!object.frees) continue;
    const auto size_bytes = static_cast<int64_t>(object.size_bytes);
    // By the program, or by the operators of the accesses so far.
    size_t in_use_until = std::max<size_t>(life.made(), object.held_until);
    for (const size_t access : life.accesses) {
      if (in_use_until < access && access > life.last_save()) {
        idle_intervals.push_back({.object = static_cast<uint32_t>(index),
                                  .first = in_use_until + 1,
                                  .last = access,
                                  .read_at = static_cast<uint32_t>(access),
                                  .size_bytes = size_bytes,
                                  .is_recast = object.recast_us.has_value()});
      }
      in_use_until = std::max(in_use_until, operator_ends[access] + 1);
    }
    const size_t last = LastIntervalOf(object, life, operator_ends);
    if (in_use_until < last) {
      idle_intervals.push_back({.object = static_cast<uint32_t>(index),
                                .first = in_use_until + 1,
                                .last = last,
                                .size_bytes = size_bytes,
                                .is_recast = object.recast_us.has_value()});
    }
  }
  std::sort(idle_intervals.begin(), idle_intervals.end(),
            [](const IdleInterval& a, const IdleInterval& b) {
              return std::pair(a.first, a.object) < std::pair(b.first, b.object);
            });
  return idle_intervals;
}

std::vector<StepMove> MovesOf(const StepTrace& step,
                              absl::Span<const IdleInterval> idle_intervals) {
  std::vector<const IdleInterval*> offloaded;
  std::vector<size_t> first_offloaded(step.objects.size(), SIZE_MAX);
  for (const IdleInterval& idle : idle_intervals) {
    if (idle.offloaded_from == IdleInterval::kStays) continue;
    offloaded.push_back(&idle);
    first_offloaded[idle.object] = std::min(first_offloaded[idle.object], idle.offloaded_from);
  }
  std::sort(offloaded.begin(), offloaded.end(), IsPrefetchedBefore);
  std::vector<StepMove> moves;
  for (const IdleInterval* idle : offloaded) {
    const bool is_fetched = idle->read_at != StepMove::kNever;
    const bool needs_no_copy =
        idle->is_recast || idle->offloaded_from != first_offloaded[idle->object];
    moves.push_back(
        {.object = idle->object,
         .evict_at = static_cast<uint32_t>(idle->offloaded_from - 1),
         .fetch_at = is_fetched ? static_cast<uint32_t>(idle->offloaded_until) : StepMove::kNever,
         .read_at = idle->read_at,
         .copies_out = !needs_no_copy});
  }
  return moves;
}

ResidencyPlanner::ResidencyPlanner(const StepTrace& step)
    : step_(step),
      used_(DeviceBytes(step, {})),
      idle_intervals_(IdleIntervalsOf(step)),
      by_last_(OrderOf(idle_intervals_, [](const IdleInterval& idle) { return idle.last; })),
      by_size_(OrderOf(idle_intervals_, [](const IdleInterval& idle) { return idle.size_bytes; })) {
}

uint64_t ResidencyPlanner::MostBytes() const {
  return static_cast<uint64_t>(*std::max_element(used_.begin(), used_.end()));
}

uint64_t ResidencyPlanner::LeastBytes() const {
  std::vector<int64_t> begins(end() + 2);  // begins less ends, by interval
  for (const IdleInterval& idle : idle_intervals_) {
    begins[idle.first] += idle.size_bytes;
    begins[idle.last + 1] -= idle.size_bytes;
  }
  int64_t least_bytes = 0;
  int64_t offloaded_bytes = 0;
  for (size_t interval = 0; interval <= end(); ++interval) {
    offloaded_bytes += begins[interval];
    least_bytes = std::max(least_bytes, used_[interval] - offloaded_bytes);
  }
  return static_cast<uint64_t>(least_bytes);
}

PlanPreferences ResidencyPlanner::ByNextAccess() const {
  PlanPreferences preferences;
  for (const IdleInterval& idle : idle_intervals_) {
    preferences.ranks.push_back(idle.is_recast ? UINT32_MAX : idle.read_at);
  }
  preferences.offloaded_by.assign(idle_intervals_.size(), IdleInterval::kStays);
  return preferences;
}

PlannedMoves ResidencyPlanner::MovesWithin(int64_t limit_bytes, EvictionRule rule,
                                           const PlanPreferences& preferences) const {
  std::vector<IdleInterval> idle_intervals = idle_intervals_;
  ChooseEvictions(limit_bytes, rule, preferences.ranks, idle_intervals);
  std::vector<IdleInterval*> offloaded;
  for (size_t i = 0; i < idle_intervals.size(); ++i) {
    idle_intervals[i].offloaded_by = preferences.offloaded_by[i];
    const bool stays = idle_intervals[i].offloaded_from == IdleInterval::kStays &&
                       idle_intervals[i].offloaded_by == IdleInterval::kStays;
    if (!stays) offloaded.push_back(&idle_intervals[i]);
  }
  RangeMaxTree used = UsedWithout(offloaded);
  DelayEvictions(limit_bytes, offloaded, used);
  PlannedMoves planned;
  planned.blockers = PrefetchEarly(limit_bytes, idle_intervals, offloaded, used);
  RecastAtEachRead(idle_intervals);
  planned.moves = MovesOf(step_, idle_intervals);
  return planned;
}

void ResidencyPlanner::ChooseEvictions(int64_t limit_bytes, EvictionRule rule,
                                       const std::vector<uint32_t>& ranks,
                                       std::vector<IdleInterval>& idle_intervals) const {
  EvictionCandidates candidates(idle_intervals, ranks, rule);
  size_t begun = 0;
  size_t over = 0;  // index in by_last_
  int64_t offloaded_bytes = 0;
  for (size_t interval = 0; interval <= end(); ++interval) {
    for (; begun < idle_intervals.size() && idle_intervals[begun].first == interval; ++begun)
      candidates.Add(begun);
    for (; over < idle_intervals.size() && idle_intervals[by_last_[over]].last < interval; ++over) {
      const IdleInterval& idle = idle_intervals[by_last_[over]];
      candidates.Remove(by_last_[over]);
      if (idle.offloaded_from != IdleInterval::kStays) offloaded_bytes -= idle.size_bytes;
    }
    while (used_[interval] - offloaded_bytes > limit_bytes) {
      const size_t chosen = candidates.Choose(used_[interval] - offloaded_bytes - limit_bytes);
      candidates.Remove(chosen);
      idle_intervals[chosen].offloaded_from = interval;
      idle_intervals[chosen].offloaded_until = idle_intervals[chosen].last;
      offloaded_bytes += idle_intervals[chosen].size_bytes;
    }
  }
}

RangeMaxTree ResidencyPlanner::UsedWithout(const std::vector<IdleInterval*>& offloaded) const {
  std::vector<int64_t> changes(end() + 2);
  for (const IdleInterval* idle : offloaded) {
    changes[idle->first] -= idle->size_bytes;
    changes[idle->last + 1] += idle->size_bytes;
  }
  std::vector<int64_t> used = used_;
  int64_t change = 0;
  for (size_t interval = 0; interval <= end(); ++interval) {
    change += changes[interval];
    used[interval] += change;
  }
  return RangeMaxTree(used);
}

// Prefetches as early as the memory allows, in the order of reads.
std::vector<Blocker> ResidencyPlanner::PrefetchEarly(
    int64_t limit_bytes, const std::vector<IdleInterval>& idle_intervals,
    std::vector<IdleInterval*>& offloaded, RangeMaxTree& used) const {
  std::sort(offloaded.begin(), offloaded.end(), IsPrefetchedBefore);
  std::vector<Blocker> blockers;
  size_t earliest = 0;
  for (IdleInterval* idle : offloaded) {
    if (idle->read_at == StepMove::kNever || idle->is_recast) continue;
    const std::optional<size_t> full = used.LastAbove(idle->last, limit_bytes - idle->size_bytes);
    idle->offloaded_until = std::max({idle->offloaded_from, earliest, full.value_or(0)});
    if (idle->offloaded_until == full) {
      const int64_t lacks_bytes = used.MostIn(*full, *full) + idle->size_bytes - limit_bytes;
      AddBlocker(*idle, *full, lacks_bytes, idle_intervals, blockers);
    }
    earliest = idle->offloaded_until;
    used.Add(idle->offloaded_until + 1, idle->last, idle->size_bytes);
  }
  return blockers;
}

void ResidencyPlanner::AddBlocker(const IdleInterval& idle, size_t interval, int64_t lacks_bytes,
                                  const std::vector<IdleInterval>& idle_intervals,
                                  std::vector<Blocker>& blockers) const {
  constexpr int64_t kMuchSmaller = 4;  // times smaller, so that its own copies cost little
  constexpr int kLooks = 64;           // of possibly thousands of small objects
  auto at = std::lower_bound(by_size_.begin(), by_size_.end(), lacks_bytes,
                             [&](size_t small, int64_t size_bytes) {
                               return idle_intervals[small].size_bytes < size_bytes;
                             });
  for (int looks = 0; looks < kLooks && at != by_size_.end(); ++looks, ++at) {
    const IdleInterval& small = idle_intervals[*at];
    if (small.size_bytes > idle.size_bytes / kMuchSmaller) return;
    const bool is_idle = small.first <= interval && interval <= small.last;
    if (!is_idle || small.offloaded_from <= interval || small.is_recast) continue;
    blockers.push_back({*at, interval});
    return;
  }
}

void ResidencyPlanner::RecastAtEachRead(std::vector<IdleInterval>& idle_intervals) const {
  std::vector<bool> leaves(step_.objects.size());
  for (const IdleInterval& idle : idle_intervals) {
    if (idle.is_recast && idle.offloaded_from != IdleInterval::kStays) leaves[idle.object] = true;
  }
  for (IdleInterval& idle : idle_intervals) {
    if (!leaves[idle.object]) continue;
    idle.offloaded_from = idle.first;
    idle.offloaded_until = idle.last;
  }
}

namespace {

struct Copy {
  uint32_t ready_at = 0;  // the access at which it can be submitted
  uint32_t object = 0;
  uint32_t evict_at = 0;
  size_t move = 0;

  // Without deferred copies, copies are submitted in this order.
  std::pair<uint32_t, uint32_t> place() const { return {ready_at, object}; }
};

struct EvictedLater {
  bool operator()(const Copy& a, const Copy& b) const {
    return std::tie(a.evict_at, a.object) > std::tie(b.evict_at, b.object);
  }
};

std::vector<Copy> CopiesOf(const StepTrace& step, const std::vector<StepMove>& moves) {
  const std::vector<size_t> leaves_from = EarliestOffloads(step);
  std::vector<Copy> copies;
  for (size_t i = 0; i < moves.size(); ++i) {
    const StepMove& move = moves[i];
    if (!move.copies_out) continue;
    const size_t ready_at = std::min<size_t>(leaves_from[move.object], move.evict_at);
    copies.push_back({static_cast<uint32_t>(ready_at), move.object, move.evict_at, i});
  }
  std::sort(copies.begin(), copies.end(),
            [](const Copy& a, const Copy& b) { return a.place() < b.place(); });
  return copies;
}

}  // namespace

std::vector<StepMove> InEvictionOrder(const StepTrace& step, std::vector<StepMove> moves,
                                      const StepTimes& times) {
  const std::vector<Copy> copies = CopiesOf(step, moves);
  const auto ready_us = [&](const Copy& copy) {
    return times.begins_us[copy.ready_at] + step.intervals[copy.ready_at].compute_us;
  };
  std::priority_queue<Copy, std::vector<Copy>, EvictedLater> waiting;
  double free_us = 0;  // when the copy stream becomes idle
  std::pair<uint32_t, uint32_t> last_place = {0, 0};
  uint32_t waits_at = UINT32_MAX;  // later copies of this access have to wait as well
  for (size_t next = 0; next < copies.size() || !waiting.empty();) {
    if (waiting.empty()) free_us = std::max(free_us, ready_us(copies[next]));
    for (; next < copies.size() && ready_us(copies[next]) <= free_us; ++next) {
      waiting.push(copies[next]);
    }
    const Copy copy = waiting.top();
    waiting.pop();
    free_us += times.out_us[copy.move] - times.out_begins_us[copy.move];
    const bool waits = copy.place() < last_place || copy.ready_at == waits_at;
    last_place = std::max(last_place, copy.place());
    moves[copy.move].copy_at = waits ? last_place.first : StepMove::kAtOnce;
    if (waits) waits_at = last_place.first;
  }
  return moves;
}

}  // namespace pinion
