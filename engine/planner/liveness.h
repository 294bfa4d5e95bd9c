// When the objects of a step are on the device, if nothing is moved: what bounds and plans share.

#ifndef PINION_ENGINE_PLANNER_LIVENESS_H_
#define PINION_ENGINE_PLANNER_LIVENESS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

// One object's life, as places in the row of intervals.
struct ObjectLiveness {
  size_t made = 0;               // the first interval with it
  size_t over = 0;               // the last one
  std::vector<size_t> in_use;    // ascending; in the others, it may be away
  std::vector<size_t> accesses;  // their ordinals
  bool is_read = false;          // after it was made
};

// By object, of a valid record. An object is in use throughout the interval that makes it,
// throughout the interval behind each later use, until it is saved for the last time, and until the
// program lets go of it.
std::vector<ObjectLiveness> LivenessOf(const StepTrace& step);

// By object: the use from which on it can leave. What an operator saves may still be written until
// it has returned, which is known when another one saves something, and of all when a forward is
// over. An object that is saved once more before that waits for that operator, too.
std::vector<size_t> EarliestOffloads(const StepTrace& step);

// By use: the last one of the same operator.
std::vector<size_t> OperatorEnds(const StepTrace& step);

// Where one object of a valid record is on the device if it is not moved: in the intervals from
// `life.made` to this one.
size_t LastIntervalOf(const StepObject& object, const ObjectLiveness& life,
                      const std::vector<size_t>& operator_ends);

// At the peak of each interval, of a valid record with moves that are possible in it.
std::vector<int64_t> DeviceBytes(const StepTrace& step, absl::Span<const StepMove> moves);

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_LIVENESS_H_
