// Which objects of a step leave the device, when their memory is let go of, and when they come
// back: a plan that keeps the step within a given device memory, at the least cost that is found.
//
//   PINION_ASSIGN_OR_RETURN(StepPlan plan, PlanStep(step, memory_bytes, link));
//   for (const StepMove& move : plan.moves) ...      // all others stay, and are never copied
//   plan.step_us, plan.peak_bytes                    // what it comes to
//
// Whom: where an interval needs more than there is, the idle object whose next use is farthest away
// goes (Belady's rule), except where another choice that was tried makes the step shorter. What
// frees nothing stays. When: the copy out begins once the operator that made the object has
// returned, or behind those whose memory has to go sooner; its device memory is let
// go of at the last use before the room is needed; it is fetched as soon as there is room until it
// is read, in the order of reading. A small object leaves, too, where a much larger one can come
// back earlier for it. All of that is by ordinal, so the peak does not depend on how fast the link
// is, only the time does (step_simulation.h).
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

// The least memory within which the step can be planned: what its hungriest interval uses.
// InvalidArgument for a record that is not valid.
absl::StatusOr<uint64_t> LeastMemoryBytes(const StepTrace& step);

enum class PlanEffort {
  kRule,   // one plan, by Belady's rule, its copies in order
  kTries,  // and others, as many as can be tried in 10 to 20 ms
};

// Within `memory_bytes`, the other bytes of the step included. ResourceExhausted, with the least
// that can be, where that is not enough. InvalidArgument for a record that is not valid, and for
// a link that was not measured.
absl::StatusOr<StepPlan> PlanStep(const StepTrace& step, uint64_t memory_bytes,
                                  const LinkCalibration& link,
                                  PlanEffort effort = PlanEffort::kTries);

// As little moved as is needed for a step of at most `slowdown` times its compute alone, in the
// least memory; 1.01 is "no slower than 1 %".
absl::StatusOr<StepPlan> PlanStepWithin(const StepTrace& step, double slowdown,
                                        const LinkCalibration& link);

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_PLAN_STEP_H_
