// Moves that keep a step within its memory, by a rule that can be told what else is wished for.
// Part of plan_step.cc.
//
//   const ResidencyPlanner planner(step);
//   PlanPreferences wishes = planner.ByNextUse();
//   PlannedMoves planned = planner.MovesWithin(memory_bytes, EvictionRule::kHighest, wishes);
//   wishes.LetGo(planned.blockers);            // what came back late may come back earlier now
//
// Thread safety: it does not change.

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

// Whom to send away where an interval needs room.
enum class EvictionRule {
  kHighest,  // of the highest rank
  kFitting,  // the same, but the smallest that makes enough room if one alone does
};

// Small, and there in an interval in which a much larger object could be back if the small one were
// away.
struct Blocker {
  size_t idle = 0;
  size_t interval = 0;
};

// By gap.
struct PlanPreferences {
  std::vector<uint32_t> ranks;    // the highest leaves first
  std::vector<size_t> leaves_by;  // the interval in which it is away at the latest; kStays: none

  void LetGo(const Blocker& small) {
    leaves_by[small.idle] = std::min(leaves_by[small.idle], small.interval);
  }
  void LetGo(absl::Span<const Blocker> all) {
    for (const Blocker& small : all) LetGo(small);
  }
};

struct PlannedMoves {
  std::vector<StepMove> moves;
  std::vector<Blocker> blockers;
};

class ResidencyPlanner {
 public:
  // `step`, which is valid, has to outlive it.
  explicit ResidencyPlanner(const StepTrace& step);

  uint64_t MostBytes() const;
  // With everything away that is idle.
  uint64_t LeastBytes() const;
  // Belady's rule: whose next use is farthest away goes first, behind what costs no copy.
  PlanPreferences ByNextUse() const;
  // The moves that keep within `limit_bytes`, which is at least LeastBytes(), of a step that has
  // gaps.
  PlannedMoves MovesWithin(int64_t limit_bytes, EvictionRule rule,
                           const PlanPreferences& wishes) const;

 private:
  size_t end() const { return step_.intervals.size() - 1; }
  void SendAway(int64_t limit_bytes, EvictionRule rule, const std::vector<uint32_t>& ranks,
                std::vector<IdleInterval>& idle_intervals) const;
  // What is there if all of these are away throughout their gaps.
  RangeMaxTree WithAway(const std::vector<IdleInterval*>& away) const;
  std::vector<Blocker> FetchEarly(int64_t limit_bytes,
                                  const std::vector<IdleInterval>& idle_intervals,
                                  std::vector<IdleInterval*>& away, RangeMaxTree& used) const;
  // Appends what would make room for `idle` in that interval, where it lacks `lacks_bytes`, if
  // there is something small enough.
  void AddBlocker(const IdleInterval& idle, size_t interval, int64_t lacks_bytes,
                  const std::vector<IdleInterval>& idle_intervals,
                  std::vector<Blocker>& blockers) const;
  // What is computed again is let go of when it is saved, so that each reader computes it.
  void LeaveAltogether(std::vector<IdleInterval>& idle_intervals) const;

  const StepTrace& step_;
  const std::vector<int64_t> used_;  // by interval, if nothing is moved
  const std::vector<IdleInterval> idle_intervals_;
  std::vector<size_t> by_last_;  // gaps in the order in which they end
  std::vector<size_t> by_size_;  // the smallest first
};

// In which order the copies out of a plan go over the link: those whose memory has to go first go
// first.
//
//   std::vector<StepMove> ordered = InEvictionOrder(step, plan.moves, times);
//
// Copies of one direction go one after the other, so that one which is made early and dropped late
// may keep others waiting whose memory is needed sooner. Of the copies that could begin when the
// link is free, by `times`, the one that is dropped first goes first (the rule of the earliest
// deadline). Where an object is to go behind one that is made later, its move says when
// (StepMove::copy_at).
//
// `times` are those of the moves in some order.
std::vector<StepMove> InEvictionOrder(const StepTrace& step, std::vector<StepMove> moves,
                                      const StepTimes& times);

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_RESIDENCY_PLANNER_H_
