#include "pinion/engine/plan/planner.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <tuple>

#include "pinion/engine/plan/step_memory.h"

namespace pinion {
namespace {

// Places in `gaps`, in the order of what `key` returns for each.
template <typename Key>
std::vector<size_t> OrderOf(const std::vector<Gap>& gaps, Key key) {
  std::vector<size_t> order(gaps.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return key(gaps[a]) < key(gaps[b]); });
  return order;
}

// What is dropped last stays the longest: for good, if there is room, and as long as it may.
void StayLong(int64_t limit_bytes, std::vector<Gap*>& away, Room& used) {
  std::sort(away.begin(), away.end(), [](const Gap* a, const Gap* b) {
    return std::tuple(a->computed_again, b->object, b->first) <
           std::tuple(b->computed_again, a->object, a->first);
  });
  std::erase_if(away, [&](Gap* gap) {
    const std::optional<size_t> full = used.FirstAbove(gap->first, limit_bytes - gap->size_bytes);
    const size_t leaves = std::min(full.value_or(Gap::kStays), gap->leaves_by);
    const bool stays = leaves > gap->last;
    if (gap->computed_again && !stays) return false;
    used.Add(gap->first, stays ? gap->last : leaves - 1, gap->size_bytes);
    gap->away_from = stays ? Gap::kStays : leaves;
    return stays;
  });
}

}  // namespace

Planner::Planner(const StepRecord& step)
    : step_(step),
      used_(DeviceBytes(step, {})),
      gaps_(GapsOf(step)),
      by_last_(OrderOf(gaps_, [](const Gap& gap) { return gap.last; })),
      by_size_(OrderOf(gaps_, [](const Gap& gap) { return gap.size_bytes; })) {}

uint64_t Planner::MostBytes() const {
  return static_cast<uint64_t>(*std::max_element(used_.begin(), used_.end()));
}

uint64_t Planner::LeastBytes() const {
  std::vector<int64_t> begins(end() + 2);  // of gaps less those that end, by stretch
  for (const Gap& gap : gaps_) {
    begins[gap.first] += gap.size_bytes;
    begins[gap.last + 1] -= gap.size_bytes;
  }
  int64_t least_bytes = 0;
  int64_t away_bytes = 0;
  for (size_t stretch = 0; stretch <= end(); ++stretch) {
    away_bytes += begins[stretch];
    least_bytes = std::max(least_bytes, used_[stretch] - away_bytes);
  }
  return static_cast<uint64_t>(least_bytes);
}

PlanWishes Planner::ByNextUse() const {
  PlanWishes wishes;
  for (const Gap& gap : gaps_) {
    wishes.ranks.push_back(gap.computed_again ? UINT32_MAX : gap.read_at);
  }
  wishes.leaves_by.assign(gaps_.size(), Gap::kStays);
  return wishes;
}

PlannedMoves Planner::MovesWithin(int64_t limit_bytes, Choice choice,
                                  const PlanWishes& wishes) const {
  std::vector<Gap> gaps = gaps_;
  SendAway(limit_bytes, choice, wishes.ranks, gaps);
  std::vector<Gap*> away;
  for (size_t i = 0; i < gaps.size(); ++i) {
    gaps[i].leaves_by = wishes.leaves_by[i];
    const bool stays = gaps[i].away_from == Gap::kStays && gaps[i].leaves_by == Gap::kStays;
    if (!stays) away.push_back(&gaps[i]);
  }
  Room used = WithAway(away);
  StayLong(limit_bytes, away, used);
  PlannedMoves planned;
  planned.in_the_way = FetchEarly(limit_bytes, gaps, away, used);
  LeaveAltogether(gaps);
  planned.moves = MovesOf(step_, gaps);
  return planned;
}

void Planner::SendAway(int64_t limit_bytes, Choice choice, const std::vector<uint32_t>& ranks,
                       std::vector<Gap>& gaps) const {
  IdleGaps idle(gaps, ranks, choice);
  size_t begun = 0;
  size_t over = 0;  // in by_last_
  int64_t away_bytes = 0;
  for (size_t stretch = 0; stretch <= end(); ++stretch) {
    for (; begun < gaps.size() && gaps[begun].first == stretch; ++begun) idle.Add(begun);
    for (; over < gaps.size() && gaps[by_last_[over]].last < stretch; ++over) {
      const Gap& gap = gaps[by_last_[over]];
      idle.Remove(by_last_[over]);
      if (gap.away_from != Gap::kStays) away_bytes -= gap.size_bytes;
    }
    while (used_[stretch] - away_bytes > limit_bytes) {
      const size_t chosen = idle.Choose(used_[stretch] - away_bytes - limit_bytes);
      idle.Remove(chosen);
      gaps[chosen].away_from = stretch;
      gaps[chosen].away_until = gaps[chosen].last;
      away_bytes += gaps[chosen].size_bytes;
    }
  }
}

Room Planner::WithAway(const std::vector<Gap*>& away) const {
  std::vector<int64_t> changes(end() + 2);
  for (const Gap* gap : away) {
    changes[gap->first] -= gap->size_bytes;
    changes[gap->last + 1] += gap->size_bytes;
  }
  std::vector<int64_t> used = used_;
  int64_t change = 0;
  for (size_t stretch = 0; stretch <= end(); ++stretch) {
    change += changes[stretch];
    used[stretch] += change;
  }
  return Room(used);
}

// In the order of reading: one copy in comes behind the other.
std::vector<InTheWay> Planner::FetchEarly(int64_t limit_bytes, const std::vector<Gap>& gaps,
                                          std::vector<Gap*>& away, Room& used) const {
  std::sort(away.begin(), away.end(), [](const Gap* a, const Gap* b) {
    return std::tuple(a->read_at, a->object) < std::tuple(b->read_at, b->object);
  });
  std::vector<InTheWay> in_the_way;
  size_t earliest = 0;
  for (Gap* gap : away) {
    if (gap->read_at == StepMove::kNever || gap->computed_again) continue;
    const std::optional<size_t> full = used.LastAbove(gap->last, limit_bytes - gap->size_bytes);
    gap->away_until = std::max({gap->away_from, earliest, full.value_or(0)});
    if (gap->away_until == full) {
      const int64_t lacks_bytes = used.MostIn(*full, *full) + gap->size_bytes - limit_bytes;
      NoteInTheWay(*gap, *full, lacks_bytes, gaps, in_the_way);
    }
    earliest = gap->away_until;
    used.Add(gap->away_until + 1, gap->last, gap->size_bytes);
  }
  return in_the_way;
}

void Planner::NoteInTheWay(const Gap& gap, size_t stretch, int64_t lacks_bytes,
                           const std::vector<Gap>& gaps, std::vector<InTheWay>& in_the_way) const {
  constexpr int64_t kMuchSmaller = 4;  // times, so that its own copies cost little
  constexpr int kLooks = 64;           // of thousands that are small
  auto at = std::lower_bound(
      by_size_.begin(), by_size_.end(), lacks_bytes,
      [&](size_t small, int64_t size_bytes) { return gaps[small].size_bytes < size_bytes; });
  for (int looks = 0; looks < kLooks && at != by_size_.end(); ++looks, ++at) {
    const Gap& small = gaps[*at];
    if (small.size_bytes > gap.size_bytes / kMuchSmaller) return;
    const bool is_idle = small.first <= stretch && stretch <= small.last;
    if (!is_idle || small.away_from <= stretch || small.computed_again) continue;
    in_the_way.push_back({*at, stretch});
    return;
  }
}

void Planner::LeaveAltogether(std::vector<Gap>& gaps) const {
  std::vector<bool> leaves(step_.objects.size());
  for (const Gap& gap : gaps) {
    if (gap.computed_again && gap.away_from != Gap::kStays) leaves[gap.object] = true;
  }
  for (Gap& gap : gaps) {
    if (!leaves[gap.object]) continue;
    gap.away_from = gap.first;
    gap.away_until = gap.last;
  }
}

}  // namespace pinion
