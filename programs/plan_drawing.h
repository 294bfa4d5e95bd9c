// A planned step over time, for people: an SVG picture, or JSON that ui.perfetto.dev opens.
//
//   const std::vector<PlannedStep> steps = session->PlannedSteps(device_index);
//   if (!steps.empty()) Write("plan.svg", DrawPlan(steps.front(), PlanDrawing::kSvg));
//
// Thread safety: pure functions.

#ifndef PINION_PROGRAMS_PLAN_DRAWING_H_
#define PINION_PROGRAMS_PLAN_DRAWING_H_

#include <string>

#include "pinion/engine/planner/explain_plan.h"
#include "pinion/programs/plan_timeline.h"

namespace pinion {

enum class PlanDrawing { kSvg, kChromeTrace };

// If the plan is impossible in the step, the text of ExplainPlan, which says why.
std::string DrawPlan(const PlannedStep& planned, PlanDrawing drawing);

// Lanes of compute, copies out and copies in, the objects' times on the device, and the device's
// bytes below the line of the memory limit. A tooltip says why an object stays, moves or waits.
// `title` stands above the picture, and the timeline's note below the title.
std::string SvgOf(const PlanTimeline& timeline, const std::string& title);

// Rows of compute, copies out and copies in, and a graph of the device's bytes.
std::string ChromeTraceOf(const PlanTimeline& timeline);

}  // namespace pinion

#endif  // PINION_PROGRAMS_PLAN_DRAWING_H_
