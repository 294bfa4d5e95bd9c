// A planned step for people, in words and a table: what it takes, what moves when, and what waits
// for it.
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

// A planned step, with all that it takes to show it.
struct PlannedStep {
  StepTrace step = {};
  StepPlan plan = {};  // that PlanStep has made of the step for that link
  LinkCalibration link = {};
  uint64_t limit_bytes = 0;  // the memory that the plan was to keep to
  std::string note = "";     // what a reader must not miss; mostly empty
};

// Of a plan that PlanStep has made of the step for that link. Where that is not so, the text says
// why.
std::string ExplainPlan(const StepTrace& step, const StepPlan& plan, const LinkCalibration& link);
// The same, and the note.
std::string ExplainPlan(const PlannedStep& planned);

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_EXPLAIN_PLAN_H_
