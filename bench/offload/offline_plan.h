// Searches long for the shortest plan of a step: the reference for a planner that has milliseconds.
//
//   PINION_ASSIGN_OR_RETURN(const StepPlan best, SearchPlan(step, memory_bytes, link, {}));
//
// The search is simulated annealing. It starts once from PlanStep's plan and once from a plan that
// offloads everything. A random change either chooses another set of objects to offload, or moves
// one eviction or fetch. A longer plan is accepted with a probability that falls. Plans move whole
// tensors in the order of their copies and reads, as engine/planner/step_simulation.h simulates.
// For steps with few enough plans to try all, the search finds the best one
// (tests/bench/offload/offline_plan_test.cc).
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
