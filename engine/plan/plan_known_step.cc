#include "pinion/engine/plan/plan_known_step.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/plan/mixed_plan.h"
#include "pinion/engine/plan/step_plan.h"

namespace pinion {

absl::StatusOr<std::shared_ptr<const KnownStep>> PlanKnownStep(
    StepRecord step, std::optional<uint64_t> memory_bytes, double slowdown,
    const LinkCalibration& link, bool mixes, const SetAside& aside, uint64_t margin_bytes) {
  if (!memory_bytes.has_value()) {
    PINION_ASSIGN_OR_RETURN(StepPlan plan, PlanStepWithin(step, slowdown, link));
    return std::make_shared<const KnownStep>(std::move(step), std::move(plan));
  }
  PINION_ASSIGN_OR_RETURN(const uint64_t least_bytes, LeastMemoryBytes(step));
  const uint64_t left_bytes = *memory_bytes - std::min(*memory_bytes, least_bytes);
  const uint64_t aside_bytes = std::clamp(left_bytes, aside.least_bytes, aside.enough_bytes);
  const uint64_t allowed_bytes = *memory_bytes - std::min(*memory_bytes, aside_bytes);
  const uint64_t spare_bytes = allowed_bytes - std::min(allowed_bytes, least_bytes);
  const uint64_t step_bytes = allowed_bytes - std::min(margin_bytes, spare_bytes);
  if (mixes) {
    absl::StatusOr<MixedPlan> mixed = PlanMixedStep(step, step_bytes, link);
    if (mixed.ok()) {
      return std::make_shared<const KnownStep>(std::move(step), std::move(mixed->without),
                                               absl::OkStatus(), std::move(mixed->computed_again),
                                               allowed_bytes);
    }
    if (!absl::IsResourceExhausted(mixed.status())) return mixed.status();
  }
  absl::Status shortfall;
  absl::StatusOr<StepPlan> plan = PlanStep(step, step_bytes, link);
  if (absl::IsResourceExhausted(plan.status())) {
    shortfall = plan.status();
    if (aside_bytes > 0) {
      const uint64_t all_bytes = least_bytes + aside_bytes;
      shortfall = absl::ResourceExhaustedError(absl::StrCat(
          shortfall.message(),
          ". Beside it weights that visit, and verify's checksums, take at least ", aside_bytes,
          " bytes (", HumanBytes(aside_bytes), "): the target's least is ", all_bytes, " bytes (",
          HumanBytes(all_bytes), ")"));
    }
    plan = PlanStep(step, least_bytes, link);
  }
  PINION_RETURN_IF_ERROR(plan.status());
  const uint64_t known_bytes = shortfall.ok() ? allowed_bytes : UINT64_MAX;
  return std::make_shared<const KnownStep>(std::move(step), *std::move(plan), std::move(shortfall),
                                           std::vector<uint32_t>(), known_bytes);
}

}  // namespace pinion
