// Which of the steps that run as planned are measured, and whether a plan has to be made again.
//
//   watch.OnStep();
//   if (watch.IsDue()) ...                          // measure the step that begins
//   if (watch.IsOff(plan, {.step_us = us})) ...     // record the step once more and plan it again
//
// What the model does not know (the host's calls, for example) makes each plan off by the same
// factor. Where one was off, the next ones are expected to be off by as much. Where that does not
// hold either, twice as many steps pass before another one is measured, so that programs whose
// steps differ from time to time are recorded less and less often.
//
// A step that has more on the device than it may is off however little that is. Where the plan of
// a new record has, too, something does that which no record shows, as an allocator that gives more
// than it was asked for: plans leave as much free from then on (margin_bytes()).
//
// Thread safety: none.

#ifndef PINION_ENGINE_SCHEDULE_PLAN_VALIDATOR_H_
#define PINION_ENGINE_SCHEDULE_PLAN_VALIDATOR_H_

#include <cmath>
#include <cstdint>
#include <optional>

#include "pinion/engine/planner/step_plan.h"

namespace pinion {

// What is empty could not be measured.
struct MeasuredStep {
  std::optional<double> step_us = std::nullopt;
  std::optional<uint64_t> peak_bytes = std::nullopt;
};

class PlanValidator {
 public:
  static constexpr uint64_t kEvery = 16;    // steps, as long as plans are right
  static constexpr double kMostOff = 0.02;  // of what is expected

  void OnStep() { ++steps_; }
  bool IsDue() const { return steps_ >= every_; }
  // Of a step that ran by that plan, and may have `memory_bytes`.
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
  // Of what a step may have, for what no record shows.
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

  uint64_t steps_ = 0;  // since one was measured
  uint64_t every_ = kEvery;
  double time_factor_ = 1;
  double peak_factor_ = 1;
  bool was_over_ = false;  // the last one that was measured
  uint64_t margin_bytes_ = 0;
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_PLAN_VALIDATOR_H_
