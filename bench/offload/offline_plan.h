// Searches long for the shortest plan of a step: the reference for a planner that has milliseconds.
//
//   PINION_ASSIGN_OR_RETURN(const StepPlan best, SearchPlan(step, memory_bytes, link, {}));
//
// It goes on at random, once from what PlanStep finds and once from everything being away: another
// choice of who leaves, from which everybody's leaving and coming back follows; or one object that
// leaves or comes back earlier or later. Longer plans are gone on from less and less often
// (simulated annealing). A plan is of whole tensors, in the order of their copies out and of their
// reads, as the simulation has it (engine/planner/step_simulation.h). Of steps that are small
// enough to try every plan it finds the best (tests/bench/offload/offline_plan_test.cc).
//
// Thread safety: a pure function.

#ifndef PINION_BENCH_OFFLOAD_OFFLINE_PLAN_H_
#define PINION_BENCH_OFFLOAD_OFFLINE_PLAN_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

struct PlanSearch {
  int tries = 2000;  // most simulated plans from each start
  uint64_t seed = 1;
};

// Errors as those of PlanStep.
absl::StatusOr<StepPlan> SearchPlan(const StepTrace& step, uint64_t memory_bytes,
                                    const LinkCalibration& link, const PlanSearch& search);

}  // namespace pinion

#endif  // PINION_BENCH_OFFLOAD_OFFLINE_PLAN_H_
