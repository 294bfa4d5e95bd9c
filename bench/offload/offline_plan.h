// Searches long for the shortest plan of a step: the reference for a planner that has milliseconds.
//
//   PINION_ASSIGN_OR_RETURN(const StepPlan best, SearchPlan(step, memory_bytes, link, {}));
//
// Simulated annealing, once from PlanStep's plan and once from all objects offloaded. A random
// change is another set of offloaded objects with derived times, or another time of some offloads
// or prefetches. A plan moves whole tensors in the order of the simulation
// (engine/plan/step_simulation.h). The search finds the best plan of steps small enough for an
// exhaustive search (tests/bench/offload/offline_plan_test.cc).
//
// Thread safety: a pure function.

#ifndef PINION_BENCH_OFFLOAD_OFFLINE_PLAN_H_
#define PINION_BENCH_OFFLOAD_OFFLINE_PLAN_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "pinion/engine/plan/link_calibration.h"
#include "pinion/engine/plan/step_plan.h"
#include "pinion/engine/plan/step_record.h"

namespace pinion {

struct PlanSearch {
  int tries = 2000;  // most simulated plans from each start
  uint64_t seed = 1;
};

// Errors: those of PlanStep.
absl::StatusOr<StepPlan> SearchPlan(const StepRecord& step, uint64_t memory_bytes,
                                    const LinkCalibration& link, const PlanSearch& search);

}  // namespace pinion

#endif  // PINION_BENCH_OFFLOAD_OFFLINE_PLAN_H_
