// Describes a planned step for people: its time, its stalls, what moves, and why the rest stays.
//
//   std::puts(ExplainPlan(step, plan, link).c_str());
//
//   0.070 ms (modelled), 1.410 x the compute alone (0.050 ms), within 20 KiB; 1 of 2 objects ...
//   stalls: 0.010 ms for copies out, 0.010 ms for copies in
//     object       size   made    out, ms   gone   back   read     in, ms
//          0     10 KiB      0      0.030      1      3      3      0.060
//   stay: 1 of 2 objects, 10 KiB of 20 KiB
//          1     10 KiB  in use as long as the step needs it
//     object       size   made   read
//          1     10 KiB      1      2  in use as long as the step needs it
//
// An object's number is the rank of its first save. The other numbers are indices of accesses: the
// object is evicted at "gone" and fetched at "back". Times are modelled, by SimulateStep. What
// stays is summed by reason; then the ten largest objects follow.
//
// Thread safety: pure functions.

#ifndef PINION_ENGINE_PLANNER_EXPLAIN_PLAN_H_
#define PINION_ENGINE_PLANNER_EXPLAIN_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"

namespace pinion {

// A planned step with all that describes it.
struct PlannedStep {
  StepTrace step = {};
  StepPlan plan = {};  // PlanStep's, of that step and link
  LinkCalibration link = {};
  uint64_t limit_bytes = 0;  // the memory that the plan was made for
  std::string note = "";     // what a reader must not miss; mostly empty
};

// Returns by object, for people, why a plan keeps it on the device; empty if it moves. The plan's
// moves must be possible in the step.
std::vector<absl::string_view> WhyObjectsStay(const StepTrace& step, const StepPlan& plan);

// Describes a plan that PlanStep made of the step for that link. If the plan does not belong to the
// step, the text is the error.
std::string ExplainPlan(const StepTrace& step, const StepPlan& plan, const LinkCalibration& link);
// Appends the note.
std::string ExplainPlan(const PlannedStep& planned);

}  // namespace pinion

#endif  // PINION_ENGINE_PLANNER_EXPLAIN_PLAN_H_
