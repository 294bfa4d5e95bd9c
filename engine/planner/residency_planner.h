// Moves that keep a step within its memory, by a rule that can be told what else is wished for.
// Part of plan_step.cc.
//
//   const Planner planner(step);
//   PlanWishes wishes = planner.ByNextUse();
//   PlannedMoves planned = planner.MovesWithin(memory_bytes, Choice::kHighest, wishes);
//   wishes.LetGo(planned.in_the_way);            // what came back late may come back earlier now
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

// Whom to send away where a stretch needs room.
enum class Choice {
  kHighest,  // of the highest rank
  kFitting,  // the same, but the smallest that makes enough room if one alone does
};

// Small, and there in a stretch in which a much larger object could be back if the small one were
// away.
struct InTheWay {
  size_t gap = 0;
  size_t stretch = 0;
};

// By gap.
struct PlanWishes {
  std::vector<uint32_t> ranks;    // the highest leaves first
  std::vector<size_t> leaves_by;  // the stretch in which it is away at the latest; kStays: none

  void LetGo(const InTheWay& small) {
    leaves_by[small.gap] = std::min(leaves_by[small.gap], small.stretch);
  }
  void LetGo(absl::Span<const InTheWay> all) {
    for (const InTheWay& small : all) LetGo(small);
  }
};

struct PlannedMoves {
  std::vector<StepMove> moves;
  std::vector<InTheWay> in_the_way;
};

class Planner {
 public:
  // `step`, which is valid, has to outlive it.
  explicit Planner(const StepRecord& step);

  uint64_t MostBytes() const;
  // With everything away that is idle.
  uint64_t LeastBytes() const;
  // Belady's rule: whose next use is farthest away goes first, behind what costs no copy.
  PlanWishes ByNextUse() const;
  // The moves that keep within `limit_bytes`, which is at least LeastBytes(), of a step that has
  // gaps.
  PlannedMoves MovesWithin(int64_t limit_bytes, Choice choice, const PlanWishes& wishes) const;

 private:
  size_t end() const { return step_.stretches.size() - 1; }
  void SendAway(int64_t limit_bytes, Choice choice, const std::vector<uint32_t>& ranks,
                std::vector<Gap>& gaps) const;
  // What is there if all of these are away throughout their gaps.
  Room WithAway(const std::vector<Gap*>& away) const;
  std::vector<InTheWay> FetchEarly(int64_t limit_bytes, const std::vector<Gap>& gaps,
                                   std::vector<Gap*>& away, Room& used) const;
  // Appends what would make room for `gap` in that stretch, where it lacks `lacks_bytes`, if there
  // is something small enough.
  void NoteInTheWay(const Gap& gap, size_t stretch, int64_t lacks_bytes,
                    const std::vector<Gap>& gaps, std::vector<InTheWay>& in_the_way) const;
  // What is computed again is let go of when it is saved, so that each reader computes it.
  void LeaveAltogether(std::vector<Gap>& gaps) const;

  const StepRecord& step_;
  const std::vector<int64_t> used_;  // by stretch, if nothing is moved
  const std::vector<Gap> gaps_;
  std::vector<size_t> by_last_;  // gaps in the order in which they end
  std::vector<size_t> by_size_;  // the smallest first
};

// In which order the copies out of a plan go over the link: those whose memory has to go first go
// first.
//
//   std::vector<StepMove> ordered = InOrderOfDrops(step, plan.moves, times);
//
// Copies of one direction go one after the other, so that one which is made early and dropped late
// may keep others waiting whose memory is needed sooner. Of the copies that could begin when the
// link is free, by `times`, the one that is dropped first goes first (the rule of the earliest
// deadline). Where an object is to go behind one that is made later, its move says when
// (StepMove::copy_at).
//
// `times` are those of the moves in some order.
std::vector<StepMove> InOrderOfDrops(const StepRecord& step, std::vector<StepMove> moves,
                                     const StepTimes& times);

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_RESIDENCY_PLANNER_H_
