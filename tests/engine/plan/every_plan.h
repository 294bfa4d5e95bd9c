// Enumerates every plan of a small step: in each idle interval an object may stay, or be offloaded
// for any part of it. Objects are copied out in the order of their creation. The peak is counted
// independently of the planner. Times come from SimulateStep, which has its own tests.

#ifndef PINION_TESTS_ENGINE_PLAN_EVERY_PLAN_H_
#define PINION_TESTS_ENGINE_PLAN_EVERY_PLAN_H_

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "pinion/engine/plan/link_calibration.h"
#include "pinion/engine/plan/step_plan.h"
#include "pinion/engine/plan/step_record.h"

namespace pinion::testing {

// The link of these steps.
LinkCalibration SmallLink();

uint64_t CountedPeak(const StepRecord& step, const std::vector<StepMove>& moves);

struct BestPlan {
  uint64_t least_bytes = std::numeric_limits<uint64_t>::max();
  double step_us = std::numeric_limits<double>::infinity();  // within the memory
};

// Returns the best of all plans over SmallLink().
BestPlan BestOfEveryPlan(const StepRecord& step, uint64_t memory_bytes);

// One forward of `objects` and its backward.
StepRecord RandomChain(std::mt19937& random, uint32_t objects, bool equal_sizes);

// Objects are read in any order, once, twice or never; some free nothing.
StepRecord RandomOrder(std::mt19937& random);

}  // namespace pinion::testing

#endif  // PINION_TESTS_ENGINE_PLAN_EVERY_PLAN_H_
