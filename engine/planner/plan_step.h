// Computes the plan of a step: which objects are offloaded, and when they are evicted and
// prefetched. The step keeps within a given device memory, in the shortest time that was found.
//
//   PINION_ASSIGN_OR_RETURN(StepPlan plan, PlanStep(step, memory_bytes, link));
//   for (const StepMove& move : plan.moves) ...      // all other objects stay resident
//   plan.step_us, plan.peak_bytes
//
// Which objects: where an interval exceeds the memory, the idle object with the farthest next
// access is evicted (Belady's rule). A search replaces single choices where that shortens the step.
// An object whose eviction frees nothing stays. A small object is also evicted if a much larger one
// can then be prefetched earlier.
//
// When: a copy out begins when the operator that made the object has returned, or after copies with
// earlier evictions. The object is evicted at the last access before its memory is needed, and
// prefetched as soon as it fits, in the order of reads.
//
// A plan names accesses, not times. So its peak does not depend on the link; only the time does
// (step_simulation.h).
//
// Thread safety: pure functions.

#ifndef PINION_ENGINE_PLANNER_PLAN_STEP_H_
#define PINION_ENGINE_PLANNER_PLAN_STEP_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

// Returns the least memory for which a plan exists. InvalidArgument for an invalid trace.
absl::StatusOr<uint64_t> LeastMemoryBytes(const StepTrace& step);

enum class PlanEffort {
  kRule,   // one plan by Belady's rule, copies in order
  kTries,  // also others, for 10 to 20 ms
};

// Plans the step within `memory_bytes`, which include its other bytes. ResourceExhausted names the
// least memory if that is more. InvalidArgument for an invalid trace, or a link without
// measurements.
absl::StatusOr<StepPlan> PlanStep(const StepTrace& step, uint64_t memory_bytes,
                                  const LinkCalibration& link,
                                  PlanEffort effort = PlanEffort::kTries);

// Plans the step in the least memory in which it takes at most kMaxSlowdown times its compute.
inline constexpr double kMaxSlowdown = 1.01;
absl::StatusOr<StepPlan> PlanStepWithoutTarget(const StepTrace& step, const LinkCalibration& link);

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_PLAN_STEP_H_
