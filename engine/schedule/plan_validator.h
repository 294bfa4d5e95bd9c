// Decides which planned steps to measure, and whether a plan has to be made again.
//
//   validator.OnStep();
//   if (validator.IsDue()) ...                          // measure the step that begins
//   if (validator.IsOff(plan, {.step_us = us})) ...     // record the step again and plan it again
//
// Costs that the model does not know, such as the host's calls, make all plans wrong by the same
// factor. So after a deviation, later steps are expected to deviate by that factor. If a step still
// deviates, twice as many steps pass until the next measurement: programs whose steps vary are
// recorded less and less often.
//
// A step above its memory always counts as a deviation. If the next plan exceeds the memory too, no
// trace shows the cause, such as an allocator that rounds up. From then on plans leave that much
// free (margin_bytes()).
//
// Thread safety: none.

#ifndef PINION_ENGINE_SCHEDULE_PLAN_VALIDATOR_H_
#define PINION_ENGINE_SCHEDULE_PLAN_VALIDATOR_H_

#include <cmath>
#include <cstdint>
#include <optional>

#include "pinion/engine/planner/step_plan.h"

namespace pinion {

// Empty fields could not be measured.
struct MeasuredStep {
  std::optional<double> step_us = std::nullopt;
  std::optional<uint64_t> peak_bytes = std::nullopt;
};

class PlanValidator {
 public:
  static constexpr uint64_t kEvery = 16;    // steps between measurements while plans are right
  static constexpr double kMostOff = 0.02;  // of the expected value

  void OnStep() { ++steps_; }
  bool IsDue() const { return steps_ >= every_; }
  // Whether a step deviated from its plan. It may take `memory_bytes`.
  bool IsOff(const StepPlan& plan, const MeasuredStep& measured,
             uint64_t memory_bytes = UINT64_MAX) {
    const bool time_is_off = IsOff(plan.step_us, measured.step_us, time_factor_);
    const bool peak_is_off =
        IsOff(static_cast<double>(plan.peak_bytes), measured.peak_bytes, peak_factor_);
    const bool is_over = measured.peak_bytes.value_or(0) > memory_bytes;
    if (is_over && was_over_) margin_bytes_ += *measured.peak_bytes - memory_bytes;
    was_over_ = is_over;
    const bool is_off = time_is_off || peak_is_off || is_over;
    steps_ = 0;
    every_ = is_off ? 2 * every_ : kEvery;
    return is_off;
  }
  // Bytes of the target that plans leave free.
  uint64_t margin_bytes() const { return margin_bytes_; }

 private:
  template <typename Number>
  static bool IsOff(double planned, const std::optional<Number>& measured, double& factor) {
    if (!measured.has_value() || planned <= 0) return false;
    const auto actual = static_cast<double>(*measured);
    if (std::abs(actual - factor * planned) <= kMostOff * factor * planned) return false;
    factor = actual / planned;
    return true;
  }

  uint64_t steps_ = 0;  // since the last measurement
  uint64_t every_ = kEvery;
  double time_factor_ = 1;
  double peak_factor_ = 1;
  bool was_over_ = false;  // the last measured step
  uint64_t margin_bytes_ = 0;
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_PLAN_VALIDATOR_H_
