// Chooses moves that keep a step within its memory: Belady's rule, which preferences of a search
// can change. Also has the intervals to choose from (IdleInterval) and the order of copies out
// (InEvictionOrder). For PlanStep (plan_step.cc).
//
//   const ResidencyPlanner planner(step);
//   PlanPreferences preferences = planner.ByNextAccess();
//   PlannedMoves planned = planner.MovesWithin(memory_bytes, EvictionRule::kHighest, preferences);
//   preferences.EvictEarlier(planned.blockers);  // late prefetches may now be earlier
//
// Thread safety: ResidencyPlanner is immutable; a RangeMaxTree has one user.

#ifndef PINION_ENGINE_PLANNER_RESIDENCY_PLANNER_H_
#define PINION_ENGINE_PLANNER_RESIDENCY_PLANNER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_simulation.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

// An array of numbers with range addition and range maximum: a segment tree, of which every call
// takes logarithmic time.
//
//   RangeMaxTree tree(4);
//   tree.Add(1, 2, 10);                 // places 1 and 2
//   tree.MostIn(0, 3);                  // 10
//   tree.LastAbove(3, 9);               // 2: the last place up to 3 with more than 9
//   tree.FirstAbove(1, 9);              // 1: the first place from 1 on
class RangeMaxTree {
 public:
  explicit RangeMaxTree(size_t places) : RangeMaxTree(std::vector<int64_t>(places)) {}
  // `amounts` are the initial values.
  explicit RangeMaxTree(const std::vector<int64_t>& amounts) {
    while (leaves_ < amounts.size()) leaves_ *= 2;
    most_.resize(2 * leaves_);
    added_.resize(2 * leaves_);
    std::copy(amounts.begin(), amounts.end(), most_.begin() + static_cast<int64_t>(leaves_));
    for (size_t node = leaves_; --node > 0;) {
      most_[node] = std::max(most_[2 * node], most_[2 * node + 1]);
    }
  }

  // Adds to the places from `first` to `last`. Adds nothing if `first` is above `last`.
  void Add(size_t first, size_t last, int64_t amount) {
    if (first > last) return;
    const auto add_to = [&](size_t node) {
      most_[node] += amount;
      added_[node] += amount;
    };
    size_t left = leaves_ + first;
    size_t right = leaves_ + last;
    add_to(left);
    if (left < right) add_to(right);
    for (; left > 1; left /= 2, right /= 2) {
      const bool are_apart = left / 2 < right / 2;  // the nodes between them lie in the range
      if (are_apart && left % 2 == 0) add_to(left + 1);
      if (are_apart && right % 2 == 1) add_to(right - 1);
      for (const size_t above : {left / 2, right / 2}) {
        most_[above] = added_[above] + std::max(most_[2 * above], most_[2 * above + 1]);
      }
    }
  }
  int64_t MostIn(size_t first, size_t last) const {
    return first <= last ? MostBelow(1, 0, leaves_ - 1, {first, last}) : INT64_MIN;
  }
  std::optional<size_t> LastAbove(size_t last, int64_t limit) const {
    return LastBelow(1, 0, leaves_ - 1, last, limit);
  }
  std::optional<size_t> FirstAbove(size_t first, int64_t limit) const {
    return FirstBelow(1, 0, leaves_ - 1, first, limit);
  }

 private:
  struct Range {
    size_t first;
    size_t last;
  };

  int64_t MostBelow(size_t node, size_t begin, size_t end, const Range& range) const {
    if (range.last < begin || end < range.first) return INT64_MIN;
    if (range.first <= begin && end <= range.last) return most_[node];
    const size_t middle = (begin + end) / 2;
    const int64_t most = std::max(MostBelow(2 * node, begin, middle, range),
                                  MostBelow(2 * node + 1, middle + 1, end, range));
    return most + added_[node];  // one of the halves lies in the range
  }

  std::optional<size_t> LastBelow(size_t node, size_t begin, size_t end, size_t last,
                                  int64_t limit) const {
    if (last < begin || most_[node] <= limit) return std::nullopt;
    if (begin == end) return begin;
    const size_t middle = (begin + end) / 2;
    const int64_t below = limit - added_[node];
    const std::optional<size_t> right = LastBelow(2 * node + 1, middle + 1, end, last, below);
    return right.has_value() ? right : LastBelow(2 * node, begin, middle, last, below);
  }

  std::optional<size_t> FirstBelow(size_t node, size_t begin, size_t end, size_t first,
                                   int64_t limit) const {
    if (end < first || most_[node] <= limit) return std::nullopt;
    if (begin == end) return begin;
    const size_t middle = (begin + end) / 2;
    const int64_t below = limit - added_[node];
    const std::optional<size_t> left = FirstBelow(2 * node, begin, middle, first, below);
    return left.has_value() ? left : FirstBelow(2 * node + 1, middle + 1, end, first, below);
  }

  size_t leaves_ = 1;
  std::vector<int64_t> most_;   // below a node, without what was added to nodes above it
  std::vector<int64_t> added_;  // to all of a node
};

// Consecutive intervals in which one object is idle, so that it may be offloaded: all that a plan
// can choose from.
//
//   std::vector<IdleInterval> idle = IdleIntervalsOf(step);
//   idle[0].offloaded_from = idle[0].first;            // evicted as early as possible, ...
//   idle[0].offloaded_until = idle[0].last;            // ... and fetched when it is read
//   std::vector<StepMove> moves = MovesOf(step, idle);
struct IdleInterval {
  uint32_t object = 0;
  size_t first = 0;
  size_t last = 0;
  uint32_t read_at = StepMove::kNever;
  int64_t size_bytes = 0;
  bool is_recast = false;  // at its read; the object is then offloaded until `last`

  // The plan's decision: the intervals in which the object is offloaded. kStays: in none.
  static constexpr size_t kStays = SIZE_MAX;
  size_t offloaded_from = kStays;
  size_t offloaded_until = 0;
  size_t offloaded_by = kStays;  // the interval in which it is offloaded at the latest
};

// Of a valid trace, in the order in which they begin.
std::vector<IdleInterval> IdleIntervalsOf(const StepTrace& step);

// Returns StepPlan::moves for the decisions, in the order of prefetches: by the access that reads
// the object, recasts last.
std::vector<StepMove> MovesOf(const StepTrace& step, absl::Span<const IdleInterval> idle_intervals);

// Which idle object to evict where an interval exceeds the memory.
enum class EvictionRule {
  kHighest,  // the one with the highest rank
  kFitting,  // the smallest one that alone frees enough, if there is one; else as kHighest
};

// A small object that is resident in an interval in which a much larger object could be resident
// instead.
struct Blocker {
  size_t idle = 0;  // index of its idle interval
  size_t interval = 0;
};

// Both by index of idle intervals.
struct PlanPreferences {
  std::vector<uint32_t> ranks;  // the highest is evicted first
  std::vector<size_t>
      offloaded_by;  // the interval in which it is offloaded at the latest, or kStays

  void EvictEarlier(const Blocker& small) {
    offloaded_by[small.idle] = std::min(offloaded_by[small.idle], small.interval);
  }
  void EvictEarlier(absl::Span<const Blocker> all) {
    for (const Blocker& small : all) EvictEarlier(small);
  }
};

struct PlannedMoves {
  std::vector<StepMove> moves;
  std::vector<Blocker> blockers;
};

class ResidencyPlanner {
 public:
  // `step` is valid and has to outlive the planner.
  explicit ResidencyPlanner(const StepTrace& step);

  // The peak without moves.
  uint64_t MostBytes() const;
  // The peak if every idle object is offloaded.
  uint64_t LeastBytes() const;
  // Belady's rule: the farthest next access ranks highest, and recasts, which need no copy, first.
  PlanPreferences ByNextAccess() const;
  // Returns moves that keep the step within `limit_bytes`, which is at least LeastBytes(). The step
  // has idle intervals.
  PlannedMoves MovesWithin(int64_t limit_bytes, EvictionRule rule,
                           const PlanPreferences& preferences) const;

 private:
  size_t end() const { return step_.intervals.size() - 1; }
  void ChooseEvictions(int64_t limit_bytes, EvictionRule rule, const std::vector<uint32_t>& ranks,
                       std::vector<IdleInterval>& idle_intervals) const;
  // Memory by interval if all of these are offloaded throughout their idle intervals.
  RangeMaxTree UsedWithout(const std::vector<IdleInterval*>& offloaded) const;
  std::vector<Blocker> PrefetchEarly(int64_t limit_bytes,
                                     const std::vector<IdleInterval>& idle_intervals,
                                     std::vector<IdleInterval*>& offloaded,
                                     RangeMaxTree& used) const;
  // Appends a small object whose eviction would make `idle` fit in that interval, which exceeds the
  // limit by `lacks_bytes`. Appends nothing if there is none.
  void AddBlocker(const IdleInterval& idle, size_t interval, int64_t lacks_bytes,
                  const std::vector<IdleInterval>& idle_intervals,
                  std::vector<Blocker>& blockers) const;
  // Recast objects are discarded after each save, so that each reader recasts them.
  void RecastAtEachRead(std::vector<IdleInterval>& idle_intervals) const;

  const StepTrace& step_;
  const std::vector<int64_t> used_;  // by interval, if nothing is moved
  const std::vector<IdleInterval> idle_intervals_;
  std::vector<size_t> by_last_;  // idle intervals by their end
  std::vector<size_t> by_size_;  // by size, the smallest first
};

// Orders the copies out of a plan by earliest deadline, and sets StepMove::copy_at accordingly.
//
//   std::vector<StepMove> ordered = InEvictionOrder(step, plan.moves, times);
//
// Copies of one direction run one after the other. A copy that is submitted early and evicted late
// would delay copies with earlier evictions. So whenever the copy stream is free, the copy with the
// earliest eviction goes first, among those that can begin. `times` are those of the moves in some
// order.
std::vector<StepMove> InEvictionOrder(const StepTrace& step, std::vector<StepMove> moves,
                                      const StepTimes& times);

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_RESIDENCY_PLANNER_H_
