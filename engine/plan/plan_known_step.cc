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
                                                               const LinkCalibration& link,
                                                               bool mixes) {
  if (!memory_bytes.has_value()) {
    PINION_ASSIGN_OR_RETURN(StepPlan plan, PlanStepWithin(step, slowdown, link));
    return std::make_shared<const KnownStep>(std::move(step), std::move(plan));
  }
  if (mixes) {
    absl::StatusOr<MixedPlan> mixed = PlanMixedStep(step, *memory_bytes, link);
    if (mixed.ok()) {
      return std::make_shared<const KnownStep>(std::move(step), std::move(mixed->without),
                                               absl::OkStatus(), std::move(mixed->computed_again));
    }
    if (!absl::IsResourceExhausted(mixed.status())) return mixed.status();
  }
  absl::Status shortfall;
  absl::StatusOr<StepPlan> plan = PlanStep(step, *memory_bytes, link);
  if (absl::IsResourceExhausted(plan.status())) {
    shortfall = plan.status();
    PINION_ASSIGN_OR_RETURN(const uint64_t least_bytes, LeastMemoryBytes(step));
    plan = PlanStep(step, least_bytes, link);
  }
  PINION_RETURN_IF_ERROR(plan.status());
  return std::make_shared<const KnownStep>(std::move(step), *std::move(plan), std::move(shortfall));
}

}  // namespace pinion
