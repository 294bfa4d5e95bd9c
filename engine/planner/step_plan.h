// A plan of a training step: which objects are offloaded, when they are evicted, and when they are
// fetched. PlanStep (plan_step.h) computes one.
//
// Plain data.

#ifndef PINION_ENGINE_PLANNER_STEP_PLAN_H_
#define PINION_ENGINE_PLANNER_STEP_PLAN_H_

#include <cstdint>
#include <vector>

namespace pinion {

// Keeps an object offloaded from behind access `evict_at` until access `fetch_at`, a later one.
struct StepMove {
  static constexpr uint32_t kNever = UINT32_MAX;
  static constexpr uint32_t kAtOnce = 0;

  uint32_t object = 0;
  uint32_t evict_at = 0;  // the compute waits for the copy out here, then the memory is freed
  uint32_t fetch_at = 0;  // memory is allocated and the copy in submitted here; kNever: not at all
  uint32_t read_at = 0;   // the compute waits for the copy in here, or recasts the object
  // The copy out is submitted at this access, after all copies that are possible by then. At most
  // evict_at. kAtOnce: once the operator that saves the object has returned.
  uint32_t copy_at = kAtOnce;
  bool copies_out = true;  // false: the host has the bytes already, or no reader needs them

  friend bool operator==(const StepMove&, const StepMove&) = default;
};

struct StepPlan {
  // By the access that reads the object, which is the order of prefetches (MovesOf). Then moves
  // that no access reads, then recasts.
  std::vector<StepMove> moves;
  uint64_t peak_bytes = 0;  // maximum over all intervals
  double step_us = 0;       // as SimulateStep returns it
  // Within less memory the step would take longer than PlanStepWithoutTarget allows.
  bool less_is_slower = false;
};

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_STEP_PLAN_H_
