// Where the objects of a step may be away: all that a plan can choose from.
//
//   std::vector<Gap> gaps = GapsOf(step);
//   gaps[0].away_from = gaps[0].first;               // it goes as soon as it can, ...
//   gaps[0].away_until = gaps[0].last;               // ... and comes back when it is read
//   std::vector<StepMove> moves = MovesOf(step, gaps);
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

// Stretches in which an object is idle, so that it can be away.
struct Gap {
  uint32_t object = 0;
  size_t first = 0;
  size_t last = 0;
  uint32_t read_at = StepMove::kNever;
  int64_t size_bytes = 0;
  bool computed_again = false;  // when it is read, so that it is away until then

  // What was decided: in which of them it is away. kStays, if in none. And in which it is away at
  // the latest, whatever room there is.
  static constexpr size_t kStays = SIZE_MAX;
  size_t away_from = kStays;
  size_t away_until = 0;
  size_t leaves_by = kStays;
};

// Of a valid record, in the order in which they begin.
std::vector<Gap> GapsOf(const StepRecord& step);

// StepPlan::moves of what was decided.
std::vector<StepMove> MovesOf(const StepRecord& step, absl::Span<const Gap> gaps);

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_IDLE_INTERVALS_H_
