// A planned step over time, for people: an SVG picture, or JSON that ui.perfetto.dev opens.
//
//   const std::vector<PlannedStep> steps = session->PlannedSteps(device_index);
//   if (!steps.empty()) Write("plan.svg", DrawPlan(steps.front(), PlanDrawing::kSvg));
//
// Times are those of SimulateStep: modelled.
//
// Thread safety: pure functions.

#ifndef PINION_PROGRAMS_PLAN_DRAWING_H_
#define PINION_PROGRAMS_PLAN_DRAWING_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/explain_plan.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

enum class PlanDrawing { kSvg, kChromeTrace };

// If the plan is impossible in the step, the text of ExplainPlan, which says why.
std::string DrawPlan(const PlannedStep& planned, PlanDrawing drawing);

// What is computed and copied, what waits, what is on the device, and why each object stays or
// moves.
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

// Lanes of compute, copies out and copies in, the objects' times on the device, and the device's
// bytes below the line of the memory limit. A tooltip says why an object stays, moves or waits.
// `title` stands above the picture, and the timeline's note below the title.
std::string SvgOf(const PlanTimeline& timeline, const std::string& title);

// Rows of compute, copies out and copies in, and a graph of the device's bytes.
std::string ChromeTraceOf(const PlanTimeline& timeline);

}  // namespace pinion

#endif  // PINION_PROGRAMS_PLAN_DRAWING_H_
