// Enumerates all plans of a small step. In each of its gaps an object stays resident or is
// offloaded for any part of the gap. Copies out go in the order in which objects are made. The peak
// is counted here by hand, interval by interval; times are those of SimulateStep, which has tests
// of its own.

#ifndef PINION_TESTS_ENGINE_PLANNER_EVERY_PLAN_H_
#define PINION_TESTS_ENGINE_PLANNER_EVERY_PLAN_H_

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion::testing {

// The link of these steps.
LinkCalibration SmallLink();

uint64_t CountedPeak(const StepTrace& step, const std::vector<StepMove>& moves);

struct BestPlan {
  uint64_t least_bytes = std::numeric_limits<uint64_t>::max();
  double step_us = std::numeric_limits<double>::infinity();  // within the memory
};

// Of all plans of the step over SmallLink().
BestPlan BestOfEveryPlan(const StepTrace& step, uint64_t memory_bytes);

// One forward of `objects` and its backward.
StepTrace RandomChain(std::mt19937& random, uint32_t objects, bool equal_sizes);

// Objects are read in any order, once, twice or never, and some free nothing.
StepTrace RandomOrder(std::mt19937& random);

}  // namespace pinion::testing

#endif  // PINION_TESTS_ENGINE_PLANNER_EVERY_PLAN_H_
