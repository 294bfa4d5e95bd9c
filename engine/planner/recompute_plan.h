// A plan that also says which segments of a step are computed again instead of kept.
//
//   PINION_ASSIGN_OR_RETURN(RecomputePlan mixed, PlanWithRecomputation(step, memory_bytes, link));
//   mixed.segments                 // segments by index; the others are kept
//   mixed.plan                           // of mixed.step, which is the step with these
//
// Which: where the link has time for everything, none. Else segments for which there is room alone
// are tried evenly spread over the step, which gives the link time in between, from the step's end,
// by what they take for what they save, and from the step's beginning, as many of each as make the
// step shortest: the outermost ones alone, and the innermost ones alone. Then one more, one less,
// one in another's place, of any grain. Of few segments all sets are tried. Each set is planned by
// one rule (PlanEffort::kRule), and the best ones thoroughly. The result is never slower than the
// plan without.
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
  // Segments of the step, ascending, none of them inside of another.
  std::vector<uint32_t> segments;
  // The step as it is then (recomputation.h), as far as that can be known; the step itself if none
  // is computed again.
  StepTrace step;
  StepPlan plan;     // of `step`
  StepPlan without;  // of the step itself
};

// Errors as those of PlanStep.
absl::StatusOr<RecomputePlan> PlanWithRecomputation(const StepTrace& step, uint64_t memory_bytes,
                                                    const LinkCalibration& link);

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_RECOMPUTE_PLAN_H_
