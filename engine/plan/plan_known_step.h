// From a record to a step that is known: the plan for it, whatever the target.
//
// Thread safety: a pure function.

#ifndef PINION_ENGINE_PLAN_PLAN_KNOWN_STEP_H_
#define PINION_ENGINE_PLAN_PLAN_KNOWN_STEP_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "pinion/engine/plan/known_step.h"
#include "pinion/engine/plan/link_calibration.h"
#include "pinion/engine/plan/set_aside.h"
#include "pinion/engine/plan/step_record.h"

namespace pinion {

// Within `memory_bytes`, and if it `mixes`, with the mix of what is kept and computed again that is
// likely the best (mixed_plan.h), if one is better than none. Where the step does not fit, the plan
// of the least memory that can be, and KnownStep::shortfall() says why. Without `memory_bytes`, in
// the least memory that takes at most `slowdown` times the step's compute, and nothing is computed
// again. Of `memory_bytes`, some are set `aside`; `margin_bytes` more stay free where the step can
// do without.
absl::StatusOr<std::shared_ptr<const KnownStep>> PlanKnownStep(
    StepRecord step, std::optional<uint64_t> memory_bytes, double slowdown,
    const LinkCalibration& link, bool mixes, const SetAside& aside, uint64_t margin_bytes = 0);

}  // namespace pinion

#endif  // PINION_ENGINE_PLAN_PLAN_KNOWN_STEP_H_
