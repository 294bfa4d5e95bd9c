// Plans a step and which of its segments to recompute instead of keeping what they save.
//
//   PINION_ASSIGN_OR_RETURN(RecomputePlan best, PlanWithRecomputation(step, memory_bytes, link));
//   best.segments                        // indices; all other segments are kept
//   best.plan                            // of best.step, the step with these recomputed
//
// If the link hides all copies, no segment is recomputed. If there are few segments, all sets are
// tried. Otherwise the search tries prefixes of two orders: spread evenly over the step, and by
// compute time per saved byte. It does so for the outermost segments and for the innermost ones.
// Then it changes the best set by one or two segments at a time. Each set is planned by one rule
// (PlanEffort::kRule), and the best sets thoroughly. The result is never slower than the plan
// without recomputation.
//
// Thread safety: a pure function.

#ifndef PINION_ENGINE_PLANNER_RECOMPUTE_PLAN_H_
#define PINION_ENGINE_PLANNER_RECOMPUTE_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

struct RecomputePlan {
  // Indices, ascending; no segment lies inside another.
  std::vector<uint32_t> segments;
  // The step with these recomputed (recomputation.h), or the step itself.
  StepTrace step;
  StepPlan plan;     // of `step`
  StepPlan without;  // without recomputation
};

// Errors are those of PlanStep.
absl::StatusOr<RecomputePlan> PlanWithRecomputation(const StepTrace& step, uint64_t memory_bytes,
                                                    const LinkCalibration& link);

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_RECOMPUTE_PLAN_H_
