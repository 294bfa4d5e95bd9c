// Measures the device time and peak memory of a planned step now and then. It records two events
// and reads them a step later, so nobody waits. With a target in bytes it also counts all steps
// that exceed the target.
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_ACTIVATIONS_PLAN_METER_H_
#define PINION_HOOKS_ACTIVATIONS_PLAN_METER_H_

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/engine/schedule/plan_cache.h"
#include "pinion/engine/schedule/plan_validator.h"
#include "pinion/engine/stream/stream_clock.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {

class PlanMeter {
 public:
  // Steps that exceeded the target.
  struct Overshoot {
    uint64_t steps = 0;
    uint64_t most_bytes = 0;
  };

  // Without `target_bytes` no step exceeds it.
  PlanMeter(c10::Device device, std::shared_ptr<StreamClock> clock,
            std::optional<uint64_t> target_bytes)
      : device_(device), clock_(std::move(clock)), target_bytes_(target_bytes) {}

  // Returns whether the next or the current step is measured and needs OnDeviceBytes.
  bool IsDue() const;
  // Reports the allocator's bytes at each change, and the part of them that streamed weights have.
  // `added_bytes`: MemoryObserver::OnDeviceBytes's. Takes no lock.
  void OnDeviceBytes(int64_t allocated_bytes, int64_t added_bytes, int64_t streamed_bytes);
  // Declares that not all allocations between the last NoteBytes and the next one are reported. An
  // upper bound then counts. Takes no lock.
  void BeginUnobserved() { is_unobserved_ = true; }
  // The most that memory without streamed weights grew since EndAccess.
  struct Growth {
    uint64_t size_bytes = 0;
    bool exceeds = false;  // the target was exceeded since the last NoteBytes
  };
  // Reports the allocator's bytes at a save or a read, without influence on the measured peak.
  // Returns nothing outside of a step.
  std::optional<Growth> NoteBytes(const AllocatorBytes& bytes);
  // A save or read has evicted and fetched what it was to. When weights were evicted, the report
  // of that may have counted them among `streamed_bytes`. Takes no lock.
  void EndAccess(int64_t streamed_bytes) {
    access_bytes_ = last_bytes_ - streamed_bytes;
    growth_bytes_ = 0;
  }
  // The device has refused memory, with which it would have had so much. Takes no lock.
  void OnRefused(int64_t wanted_bytes) { wanted_bytes_ = wanted_bytes; }
  // Call it after a step. If the device has refused memory and given none since, so that the step
  // ended there, returns true and compares that with the target.
  bool EndedByRefusal();

  // What the schedule knows of a step.
  struct StepKind {
    bool is_recorded = false;  // it is not measured
    bool has_gradients = false;
  };
  // Begins a step. The last one has ended and ran by `last` (null: without a plan). If a plan
  // proved to be off and has to be made again, returns whether its steps begin with gradients.
  std::optional<bool> BeginStep(const std::shared_ptr<const CachedPlan>& last,
                                const StepKind& next);
  // No tensor of the step is needed. Takes no lock.
  void EndStep() { is_in_step_ = false; }
  bool IsInStep() const { return is_in_step_; }
  Overshoot overshoot() const { return {steps_over_, most_over_bytes_}; }
  // PlanValidator's, for plans that are made now.
  uint64_t margin_bytes() const;

 private:
  struct Step {
    StreamClock::Moment begin;
    std::optional<StreamClock::Moment> end = std::nullopt;
    std::shared_ptr<const CachedPlan> ran = nullptr;  // once it has ended
    int64_t peak_bytes = 0;                           // the same; 0: not reported
    bool has_gradients = false;
  };

  // Counts the current step, or the one that has just ended, if it exceeds the target by that.
  void CompareWithTarget(int64_t allocated_bytes);
  void Keep(Step step);
  // Returns whether an ended step was off; nothing until the device has reached its end.
  std::optional<bool> IsOff(const Step& step);

  const c10::Device device_;
  const std::shared_ptr<StreamClock> clock_;
  const std::optional<uint64_t> target_bytes_;
  std::atomic<int64_t> peak_bytes_{0};  // in the current step
  std::atomic<bool> is_unobserved_{false};
  std::atomic<int64_t> interval_peak_bytes_{0};   // since the last NoteBytes
  std::atomic<int64_t> interval_step_bytes_{0};   // the same, without streamed weights
  std::atomic<int64_t> interval_added_bytes_{0};  // since the last NoteBytes
  std::atomic<int64_t> last_bytes_{0};            // last reported
  // Without streamed weights: at EndAccess, and the most above that since then.
  std::atomic<int64_t> access_bytes_{0};
  std::atomic<int64_t> growth_bytes_{0};
  std::atomic<bool> interval_is_over_{false};  // it has exceeded the target
  std::atomic<int64_t> wanted_bytes_{0};       // OnRefused's, while nothing is allocated
  std::atomic<bool> is_in_step_{false};
  std::atomic<bool> is_over_{false};  // the current step exceeds the target
  std::atomic<uint64_t> steps_over_{0};
  std::atomic<uint64_t> most_over_bytes_{0};

  mutable Mutex mu_;
  PlanValidator validator_ ABSL_GUARDED_BY(mu_);
  bool has_gradients_ ABSL_GUARDED_BY(mu_) = false;  // the current step
  std::optional<Step> step_ ABSL_GUARDED_BY(mu_);    // that is measured
  AllocatorBytes noted_ ABSL_GUARDED_BY(mu_);        // by the last NoteBytes
  uint64_t plans_over_ ABSL_GUARDED_BY(mu_) =
      0;  // steps that ran by a plan and exceeded the target
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_PLAN_METER_H_
