#include "pinion/hooks/activations/plan_meter.h"

#include <bit>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace pinion {
namespace {

template <typename Number>
void RaiseTo(Number value, std::atomic<Number>& most) {
  Number now = most.load(std::memory_order_relaxed);
  while (now < value && !most.compare_exchange_weak(now, value)) {
  }
}

}  // namespace

bool PlanMeter::IsDue() const {
  MutexLock lock(mu_);
  const bool has_ended = step_.has_value() && step_->end.has_value();
  return validator_.IsDue() && !has_ended;
}

void PlanMeter::OnDeviceBytes(int64_t allocated_bytes, int64_t added_bytes,
                              int64_t streamed_bytes) {
  const int64_t step_bytes = allocated_bytes - streamed_bytes;
  // What the program allocates behind the step is not the step's.
  if (is_in_step_) {
    last_bytes_.store(allocated_bytes, std::memory_order_relaxed);
    RaiseTo(step_bytes, peak_bytes_);
    RaiseTo(step_bytes - access_bytes_, growth_bytes_);
    CompareWithTarget(allocated_bytes);
  }
  RaiseTo(allocated_bytes, interval_peak_bytes_);
  RaiseTo(step_bytes, interval_step_bytes_);
  interval_added_bytes_ += added_bytes;
  if (added_bytes > 0 && wanted_bytes_ != 0) wanted_bytes_ = 0;
}

std::optional<PlanMeter::Growth> PlanMeter::NoteBytes(const AllocatorBytes& bytes) {
  AllocatorBytes last;
  Reported reported, of_step;
  {
    MutexLock lock(mu_);
    last = std::exchange(noted_, bytes);
    reported = {interval_peak_bytes_.exchange(bytes.current), interval_added_bytes_.exchange(0)};
    of_step = {interval_step_bytes_.exchange(bytes.current - bytes.streamed), reported.added_bytes};
  }
  last_bytes_ = bytes.current;
  if (!is_in_step_) return std::nullopt;
  CompareWithTarget(bytes.current);
  if (is_unobserved_.exchange(false)) {
    const int64_t step_bytes = MostBytesBesideStreamed(last, bytes, of_step);
    // Behind a profiler nothing was reported: memory at saves and reads alone is not a peak.
    if (peak_bytes_ > 0) RaiseTo(step_bytes, peak_bytes_);
    CompareWithTarget(MostBytesBetween(last, bytes, reported));
    RaiseTo(step_bytes - access_bytes_, growth_bytes_);
  }
  return Growth{.size_bytes = static_cast<uint64_t>(growth_bytes_),
                .exceeds = interval_is_over_.exchange(false)};
}

bool PlanMeter::EndedByRefusal() {
  const int64_t wanted_bytes = wanted_bytes_.exchange(0);
  CompareWithTarget(wanted_bytes);
  return wanted_bytes > 0;
}

void PlanMeter::CompareWithTarget(int64_t allocated_bytes) {
  const auto all_bytes = static_cast<uint64_t>(allocated_bytes);
  if (!target_bytes_.has_value() || all_bytes <= *target_bytes_) return;
  interval_is_over_ = true;
  RaiseTo(all_bytes - *target_bytes_, most_over_bytes_);
  if (!is_over_.exchange(true)) ++steps_over_;
}

std::optional<bool> PlanMeter::BeginStep(const std::shared_ptr<const CachedPlan>& last,
                                         const StepKind& next) {
  std::optional<Step> step;
  is_in_step_ = true;
  wanted_bytes_ = 0;
  is_unobserved_ = false;  // what was allocated between the steps is not this one's
  const bool was_over = is_over_.exchange(false);
  {
    MutexLock lock(mu_);
    const bool had_gradients = std::exchange(has_gradients_, next.has_gradients);
    const bool is_recorded_again = next.is_recorded && had_gradients == next.has_gradients;
    // Replan after a planned step exceeded the target, at exponentially growing intervals.
    if (was_over && last != nullptr && !is_recorded_again && std::has_single_bit(++plans_over_)) {
      // The measured step's end was not noted, and this is not it.
      if (step_.has_value() && !step_->end.has_value()) step = std::exchange(step_, std::nullopt);
      return had_gradients;
    }
    // Read before OnStep: the step's first scope used it to decide whether to observe memory.
    const bool is_due = validator_.IsDue();
    validator_.OnStep();
    step = std::exchange(step_, std::nullopt);
    if (!step.has_value() && (next.is_recorded || !is_due)) return std::nullopt;
  }
  const StreamHandle stream = NativeStream(CurrentStream(device_));
  const absl::StatusOr<bool> capturing = clock_->IsCapturing(stream);
  // An event would become part of the graph.
  if (!capturing.ok() || *capturing) return std::nullopt;
  if (!step.has_value()) {
    peak_bytes_ = 0;
    Keep({.begin = clock_->Now(stream), .has_gradients = next.has_gradients});
    return std::nullopt;
  }
  if (!step->end.has_value()) {
    if (last == nullptr) return std::nullopt;
    step->end = clock_->Now(stream);
    step->ran = last;
    step->peak_bytes = peak_bytes_;
    Keep(*std::move(step));
    return std::nullopt;
  }
  const std::optional<bool> is_off = IsOff(*step);
  const bool has_gradients = step->has_gradients;
  if (!is_off.has_value()) Keep(*std::move(step));
  return is_off.value_or(false) ? std::optional(has_gradients) : std::nullopt;
}

uint64_t PlanMeter::margin_bytes() const {
  MutexLock lock(mu_);
  return validator_.margin_bytes();
}

void PlanMeter::Keep(Step step) {
  MutexLock lock(mu_);
  step_ = std::move(step);
}

std::optional<bool> PlanMeter::IsOff(const Step& step) {
  const absl::StatusOr<StreamClock::Times> times =
      clock_->Read({step.begin, *step.end}, absl::ZeroDuration());
  if (absl::IsDeadlineExceeded(times.status())) return std::nullopt;
  MeasuredStep measured;
  // Times of the host's clock do not tell when the device was done.
  if (times.ok() && !times->by_host && !step.ran->step().timed_by_host) {
    measured.step_us = times->us.back();
  }
  if (step.peak_bytes > 0) measured.peak_bytes = static_cast<uint64_t>(step.peak_bytes);
  MutexLock lock(mu_);
  return validator_.IsOff(step.ran->plan(), measured, step.ran->memory_bytes());
}

}  // namespace pinion
