// Moves that keep a step within its memory: Belady's rule, which preferences of a search can
// change. PlanStep's own (plan_step.cc).
//
//   const ResidencyPlanner planner(step);
//   PlanPreferences preferences = planner.ByNextAccess();
//   PlannedMoves planned = planner.MovesWithin(memory_bytes, EvictionRule::kHighest, preferences);
//   preferences.EvictEarlier(planned.blockers);         // prefetches that came late may come
//   earlier now
//
// Thread safety: immutable.

#ifndef PINION_ENGINE_PLANNER_RESIDENCY_PLANNER_H_
#define PINION_ENGINE_PLANNER_RESIDENCY_PLANNER_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "pinion/engine/planner/idle_intervals.h"
#include "pinion/engine/planner/range_max_tree.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_simulation.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

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
