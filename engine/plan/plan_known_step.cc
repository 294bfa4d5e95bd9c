#include "pinion/engine/plan/plan_known_step.h"

#include <utility>

#include "absl/status/status.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/plan/mixed_plan.h"
#include "pinion/engine/plan/step_plan.h"

namespace pinion {

absl::StatusOr<std::shared_ptr<const KnownStep>> PlanKnownStep(StepRecord step,
                                                               std::optional<uint64_t> memory_bytes,
                                                               double slowdown,
                                                               const LinkCalibration& link) {
  if (!memory_bytes.has_value()) {
    PINION_ASSIGN_OR_RETURN(StepPlan plan, PlanStepWithin(step, slowdown, link));
    return std::make_shared<const KnownStep>(std::move(step), std::move(plan));
  }
  absl::StatusOr<MixedPlan> mixed = PlanMixedStep(step, *memory_bytes, link);
  if (mixed.ok()) {
    return std::make_shared<const KnownStep>(std::move(step), std::move(mixed->without),
                                             absl::OkStatus(), std::move(mixed->computed_again));
  }
  if (!absl::IsResourceExhausted(mixed.status())) return mixed.status();
  PINION_ASSIGN_OR_RETURN(const uint64_t least_bytes, LeastMemoryBytes(step));
  PINION_ASSIGN_OR_RETURN(StepPlan plan, PlanStep(step, least_bytes, link));
  return std::make_shared<const KnownStep>(std::move(step), std::move(plan), mixed.status());
}

}  // namespace pinion
