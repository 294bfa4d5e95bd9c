// A planned step for people: what it takes, what moves when and why, and what waits for it. In
// words and a table, as a picture, or as a timeline.
//
//   std::puts(ExplainPlan(step, plan, link).c_str());
//
//   0.070 ms (modelled), 1.410 x the compute alone (0.050 ms), within 20 KiB; 1 of 2 objects ...
//   stalls: 0.010 ms for copies out, 0.010 ms for copies in
//     object       size   made    out, ms   gone   back   read     in, ms
//          0     10 KiB      0      0.030      1      3      3      0.060
//
// Uses are given by ordinals: the memory goes at "gone" and is taken again at "back".
// Times are those of SimulateStep: modelled.
//
// Thread safety: pure functions.

#ifndef PINION_ENGINE_PLANNER_EXPLAIN_PLAN_H_
#define PINION_ENGINE_PLANNER_EXPLAIN_PLAN_H_

#include <cstdint>
#include <string>

#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

enum class PlanFormat {
  kText,         // as above
  kSvg,          // a picture over time (plan_svg.h)
  kChromeTrace,  // JSON, which ui.perfetto.dev opens (plan_timeline.h)
};

// Of a plan that PlanStep has made of the step for that link.
std::string ExplainPlan(const StepRecord& step, const StepPlan& plan, const LinkCalibration& link);

// The same over time, in one of the other formats; in words where that cannot be. `note`, if there
// is one, is what a reader must not miss.
std::string DrawPlan(const StepRecord& step, const StepPlan& plan, const LinkCalibration& link,
                     uint64_t limit_bytes, PlanFormat format, const std::string& note = "");

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_EXPLAIN_PLAN_H_
