// Where the objects of a step may be offloaded: all that a plan can choose from.
//
//   std::vector<IdleInterval> idle = IdleIntervalsOf(step);
//   idle[0].offloaded_from = idle[0].first;            // evicted as early as possible, ...
//   idle[0].offloaded_until = idle[0].last;            // ... and fetched when it is read
//   std::vector<StepMove> moves = MovesOf(step, idle);
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

// Consecutive intervals in which one object is idle.
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

// Orders offloaded intervals by the access that reads them, recasts last. Prefetches are submitted
// in this order.
bool IsPrefetchedBefore(const IdleInterval& a, const IdleInterval& b);

// Returns StepPlan::moves for the decisions, in the order of prefetches (IsPrefetchedBefore).
std::vector<StepMove> MovesOf(const StepTrace& step, absl::Span<const IdleInterval> idle_intervals);

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_IDLE_INTERVALS_H_
