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
#include "pinion/engine/planner/idle_intervals.h"
#include "pinion/engine/planner/liveness.h"

namespace pinion {
namespace {

// Gaps (by index) of objects that are on the device and idle.
class IdleGaps {
 public:
  // The higher a gap's rank, the sooner it goes; of equal ones the first, whose copy is done first.
  IdleGaps(const std::vector<Gap>& gaps, const std::vector<uint32_t>& ranks, Choice choice)
      : gaps_(gaps), ranks_(ranks), choice_(choice), is_idle_(gaps.size()) {}

  void Add(size_t gap) {
    is_idle_[gap] = true;
    by_rank_.emplace(ranks_[gap], -static_cast<int64_t>(gap));
    if (choice_ == Choice::kFitting) by_size_.insert(BySize(gap));
  }
  void Remove(size_t gap) {
    is_idle_[gap] = false;
    if (choice_ == Choice::kFitting) by_size_.erase(BySize(gap));
  }
  // Whom to send away where so much is too much. There is one.
  size_t Choose(int64_t excess_bytes) {
    while (!is_idle_[-by_rank_.top().second]) by_rank_.pop();
    const auto highest = static_cast<size_t>(-by_rank_.top().second);
    if (choice_ == Choice::kHighest) return highest;
    const auto smallest = by_size_.lower_bound({excess_bytes, 0, 0});
    if (smallest == by_size_.end()) return highest;
    return std::get<2>(
        *std::prev(by_size_.upper_bound({std::get<0>(*smallest), UINT32_MAX, SIZE_MAX})));
  }

 private:
  std::tuple<int64_t, uint32_t, size_t> BySize(size_t gap) const {
    return {gaps_[gap].size_bytes, ranks_[gap], gap};
  }

  const std::vector<Gap>& gaps_;
  const std::vector<uint32_t>& ranks_;
  const Choice choice_;
  std::vector<bool> is_idle_;
  std::priority_queue<std::pair<uint32_t, int64_t>> by_rank_;  // and some that are not idle
  absl::btree_set<std::tuple<int64_t, uint32_t, size_t>> by_size_;
};

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

namespace {

struct Copy {
  uint32_t ready_at = 0;  // the use at which it can be submitted
  uint32_t object = 0;
  uint32_t drop_at = 0;
  size_t move = 0;

  // Where nothing is deferred, copies are submitted in this order.
  std::pair<uint32_t, uint32_t> place() const { return {ready_at, object}; }
};

struct DropsLater {
  bool operator()(const Copy& a, const Copy& b) const {
    return std::tie(a.drop_at, a.object) > std::tie(b.drop_at, b.object);
  }
};

std::vector<Copy> CopiesOf(const StepRecord& step, const std::vector<StepMove>& moves) {
  const std::vector<size_t> leaves_from = LeavesFrom(step);
  std::vector<Copy> copies;
  for (size_t i = 0; i < moves.size(); ++i) {
    const StepMove& move = moves[i];
    if (!move.copies_out) continue;
    const size_t ready_at = std::min<size_t>(leaves_from[move.object], move.drop_at);
    copies.push_back({static_cast<uint32_t>(ready_at), move.object, move.drop_at, i});
  }
  std::sort(copies.begin(), copies.end(),
            [](const Copy& a, const Copy& b) { return a.place() < b.place(); });
  return copies;
}

}  // namespace

std::vector<StepMove> InOrderOfDrops(const StepRecord& step, std::vector<StepMove> moves,
                                     const StepTimes& times) {
  const std::vector<Copy> copies = CopiesOf(step, moves);
  const auto ready_us = [&](const Copy& copy) {
    return times.begins_us[copy.ready_at] + step.stretches[copy.ready_at].compute_us;
  };
  std::priority_queue<Copy, std::vector<Copy>, DropsLater> waiting;
  double free_us = 0;  // the link, from then on
  std::pair<uint32_t, uint32_t> last_place = {0, 0};
  uint32_t waits_at = UINT32_MAX;  // what could go at that use as well goes behind one that waits
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
