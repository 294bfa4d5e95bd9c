// Steps and links whose times can be added up by hand.

#ifndef PINION_TESTS_ENGINE_PLANNER_SMALL_STEPS_H_
#define PINION_TESTS_ENGINE_PLANNER_SMALL_STEPS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion::testing {

// 1 GB/s in each direction, which is 1000 bytes per microsecond, and `duplex_gb_per_s` while both
// directions are busy.
inline LinkCalibration RoundLink(double duplex_gb_per_s = 1, double fixed_us = 0) {
  LinkCalibration link;
  link.d2h = {.fixed_us = fixed_us, .gb_per_s = 1};
  link.h2d = {.fixed_us = fixed_us, .gb_per_s = 1};
  link.d2h_duplex_gb_per_s = duplex_gb_per_s;
  link.h2d_duplex_gb_per_s = duplex_gb_per_s;
  return link;
}

// One forward that makes these objects, and its backward, which reads them in reverse; 10 us of
// compute each time.
inline StepTrace ForwardAndBackward(const std::vector<StepObject>& objects) {
  StepTrace step;
  step.objects = objects;
  for (uint32_t i = 0; i < objects.size(); ++i) step.accesses.push_back(i);
  for (size_t i = objects.size(); i-- > 0;) step.accesses.push_back(static_cast<uint32_t>(i));
  step.intervals.assign(step.accesses.size() + 1, {.compute_us = 10});
  return step;
}

// Of one size, with these signatures.
inline StepTrace ForwardAndBackward(uint64_t size_bytes, const std::vector<uint64_t>& signatures) {
  std::vector<StepObject> objects;
  for (const uint64_t signature : signatures) {
    objects.push_back({.size_bytes = size_bytes, .signature = signature});
  }
  return ForwardAndBackward(objects);
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_ENGINE_PLANNER_SMALL_STEPS_H_
