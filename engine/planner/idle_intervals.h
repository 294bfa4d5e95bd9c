// Where the objects of a step may be away: all that a plan can choose from.
//
//   std::vector<IdleInterval> idle_intervals = IdleIntervalsOf(step);
//   idle_intervals[0].away_from = gaps[0].first;               // it goes as soon as it can, ...
//   idle_intervals[0].away_until = gaps[0].last;               // ... and comes back when it is
//   read std::vector<StepMove> moves = MovesOf(step, idle_intervals);
//
// Thread safety: pure functions.

#ifndef PINION_ENGINE_PLANNER_IDLE_INTERVALS_H_
#define PINION_ENGINE_PLANNER_IDLE_INTERVALS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

// Intervals in which an object is idle, so that it can be away.
struct IdleInterval {
  uint32_t object = 0;
  size_t first = 0;
  size_t last = 0;
  uint32_t read_at = StepMove::kNever;
  int64_t size_bytes = 0;
  bool is_recast = false;  // when it is read, so that it is away until then

  // What was decided: in which of them it is away. kStays, if in none. And in which it is away at
  // the latest, whatever room there is.
  static constexpr size_t kStays = SIZE_MAX;
  size_t away_from = kStays;
  size_t away_until = 0;
  size_t leaves_by = kStays;
};

// Of a valid record, in the order in which they begin.
std::vector<IdleInterval> IdleIntervalsOf(const StepTrace& step);

// StepPlan::moves of what was decided.
std::vector<StepMove> MovesOf(const StepTrace& step, absl::Span<const IdleInterval> idle_intervals);

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_IDLE_INTERVALS_H_
