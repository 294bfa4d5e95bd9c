// When the objects of a step are on the device: without moves, and as a plan moves them.
//
// Thread safety: pure functions.

#ifndef PINION_ENGINE_PLANNER_LIVENESS_H_
#define PINION_ENGINE_PLANNER_LIVENESS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

// Lifetime of one object.
struct ObjectLiveness {
  std::vector<size_t> accesses;  // their indices, ascending
  size_t saves = 0;              // how many of them save the object: the first ones

  size_t made() const { return accesses.front(); }      // the first interval with it
  bool is_read() const { return accesses.size() > 1; }  // after it was made
  size_t last_save() const { return accesses[saves - 1]; }
};

// By object, of a valid trace.
std::vector<ObjectLiveness> LivenessOf(const StepTrace& step);

// By object: the first access at which its copy out may begin. An operator may write what it saves
// until it returns. That is known when another operator saves something, or when the forward ends.
// If the object is saved again before, it waits for that operator too.
std::vector<size_t> EarliestOffloads(const StepTrace& step);

// By access: the last access of the same operator.
std::vector<size_t> OperatorEnds(const StepTrace& step);

// Returns the last interval in which the object is on the device if no plan moves it. The first one
// is `life.made()`.
size_t LastIntervalOf(const StepObject& object, const ObjectLiveness& life,
                      const std::vector<size_t>& operator_ends);

// By interval: device memory at its peak. The trace is valid, and the moves are possible in it.
std::vector<int64_t> DeviceBytes(const StepTrace& step, absl::Span<const StepMove> moves);

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_LIVENESS_H_
