// A planned step over time: what is computed and copied, what waits, what is on the device, and why
// each object stays or moves.
//
//   PINION_ASSIGN_OR_RETURN(PlanTimeline timeline, TimelineOf(step, plan, link, target_bytes));
//   SvgOf(timeline, "a title")                // plan_drawing.h
//
// Times are those of SimulateStep: modelled.
//
// Thread safety: pure functions.

#ifndef PINION_PROGRAMS_PLAN_TIMELINE_H_
#define PINION_PROGRAMS_PLAN_TIMELINE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

struct PlanTimeline {
  struct Slice {
    double begin_us = 0;
    double end_us = 0;
    std::string what;  // for people
  };
  struct Object {
    bool moves = false;
    std::string why;           // it stays or moves, for people
    std::vector<Slice> there;  // when it is on the device
  };
  // Of one interval.
  struct Bytes {
    double begin_us = 0;
    uint64_t bytes = 0;  // at the most
  };

  double step_us = 0;
  uint64_t limit_bytes = 0;
  std::string note;            // what a reader must not miss; mostly empty
  std::vector<Slice> compute;  // from one wait to the next
  std::vector<Slice> waits;    // of the compute, for copies
  std::vector<Slice> copies_out;
  std::vector<Slice> copies_in;
  std::vector<Object> objects;
  std::vector<Bytes> device;
};

// Of a plan that PlanStep has made of the step for that link and memory. Errors as those of
// SimulateStep.
absl::StatusOr<PlanTimeline> TimelineOf(const StepTrace& step, const StepPlan& plan,
                                        const LinkCalibration& link, uint64_t limit_bytes);

}  // namespace pinion

#endif  // PINION_PROGRAMS_PLAN_TIMELINE_H_
