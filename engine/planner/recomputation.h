// Rewrites the trace of a step as if some of its segments were recomputed instead of kept.
//
//   StepTrace shorter = WithRecomputation(step, {0, 2});    // segments by index
//
// In the rewritten forward, the segment's inputs are saved before it begins. What only the segment
// saves is resident as long as the program references it. At the first read of a saved tensor the
// inputs are read instead. The following interval takes longer by the forward time from the
// segment's begin to its last save. The recomputed tensors then count among the other bytes, each
// until its last read in the segment. The second run's peak is that of the first run.
//
// This is a prediction. It errs towards more memory: what a run frees in the middle of an interval
// counts to the interval's end. Exception: tensors that a segment captures and holds until it is
// recomputed are missing, since no trace contains them.
//
// Thread safety: a pure function.

#ifndef PINION_ENGINE_PLANNER_RECOMPUTATION_H_
#define PINION_ENGINE_PLANNER_RECOMPUTATION_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

// Indices, ascending, of the segments that a plan may recompute. Such a segment was kept with all
// inner ones, and its begin was seen. One backward read something that the segment saved and that
// is not an input; a second backward would recompute the segment once more.
std::vector<uint32_t> RecomputableSegments(const StepTrace& step);

// Returns the rewritten trace, without segments. `step` is valid. `segments` are recomputable, and
// none lies inside another.
StepTrace WithRecomputation(const StepTrace& step, absl::Span<const uint32_t> segments);

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_RECOMPUTATION_H_
