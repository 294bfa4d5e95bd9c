// A planned step as a picture: lanes of compute, copies out and copies in, the objects' times on
// the device, and the device's bytes under the line of the target. What stays, moves and waits says
// why where the pointer rests on it.
//
// Thread safety: a pure function.

#ifndef PINION_ENGINE_PLANNER_PLAN_SVG_H_
#define PINION_ENGINE_PLANNER_PLAN_SVG_H_

#include <string>

#include "pinion/engine/planner/plan_timeline.h"

namespace pinion {

// `title` stands above it, and the timeline's note below that.
std::string SvgOf(const PlanTimeline& timeline, const std::string& title);

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_PLAN_SVG_H_
