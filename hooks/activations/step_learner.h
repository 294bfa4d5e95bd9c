// Records steps of one device that have no plan, and plans them. A plan that proves to be off is
// made again. All plans are discarded when a model with streamed weights is attached or detached:
// its weights change what a recording counts as other memory, and what the plans may use.
//
// A step begins with the first tensor saved while no earlier one is needed. The last step is
// planned at that moment; the host waits for its last events.
//
// With a memory target in bytes, steps that begin with and without gradients have separate plans: a
// first micro-batch creates gradients, later ones add to them. To tell, the learner looks at the
// first leaves whose gradients the last backward created or added to. Until a step of the second
// kind is recorded, it follows a plan of the first kind, which takes more memory.
//
// Thread safety: thread-safe.

#ifndef PINION_HOOKS_ACTIVATIONS_STEP_LEARNER_H_
#define PINION_HOOKS_ACTIVATIONS_STEP_LEARNER_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/engine/planner/explain_plan.h"
#include "pinion/engine/schedule/recompute_trials.h"
#include "pinion/engine/schedule/reservation.h"
#include "pinion/engine/stream/stream_clock.h"
#include "pinion/engine/tier/device_share.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_state.h"
#include "pinion/hooks/activations/plan_meter.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/plan/device_recording.h"

namespace pinion {

class StepLearner {
 public:
  // The schedule in `state` must follow plans.
  StepLearner(c10::Device device, const OffloadOptions& options,
              const std::shared_ptr<DeviceTier>& tier, OffloadState& state)
      : device_(device),
        options_(options),
        clock_(
            std::make_shared<StreamClock>(std::shared_ptr<Device>(tier, &tier->engine().device()))),
        share_(tier->share()),
        state_(state),
        meter_(device, clock_, state.planner->memory_bytes()) {}

  // Reports that a tensor is about to be saved, which may begin a step. `place` is the number of
  // its place in the scope. Returns the recording that the save belongs to, or null.
  std::shared_ptr<DeviceRecording> BeginSave(const at::Tensor& tensor, uint64_t place);
  // Ends a step that began with a tensor which was not packed. Returns whether no step runs.
  bool EndStepIfNone();
  // See MemoryObserver::OnAccumulate.
  void OnAccumulate(const at::Tensor& leaf);
  // See SavedTensorPacker::KeepSegment.
  std::optional<uint32_t> KeepSegment(const SegmentBegin& segment, ScopeId scope);

  // Runs `end`, which ends a scope, and excludes it from the recording. After that OnDeviceBytes is
  // not called until a backward reads, for example during a loss outside the scope.
  void EndScope(absl::FunctionRef<void()> end);
  // See MemoryObserver::OnUnobserved.
  void OnUnobserved();

  // The steps that are known, with their plans. The one that ran last comes first.
  std::vector<PlannedStep> PlannedSteps() const;

  // Reports that no tensor of the step is needed.
  void EndStep() { meter_.EndStep(); }
  // If memory ran out in a step, compares what it wanted with the target. Logs the target and the
  // device's peak if there was no earlier plan. For the end of a step.
  void TellOfRefusals();
  void OnRefused(int64_t wanted_bytes) { meter_.OnRefused(wanted_bytes); }
  PlanMeter::Overshoot overshoot() const { return meter_.overshoot(); }

  // Returns whether memory peaks are needed: there is a target in bytes, a step is recorded or
  // measured, or the next step's recording would be useful.
  bool IsCurious() const;
  void OnDeviceBytes(int64_t allocated_bytes, int64_t added_bytes, const void* freed);
  // Returns the allocator's bytes at a save or a read, observed or not, and compares them with the
  // target.
  uint64_t NoteDeviceBytes();
  void EndAccess() { meter_.EndAccess(static_cast<int64_t>(share_->streamed_bytes())); }

 private:
  // The first leaves to which the last backward added gradients. Until a running backward adds,
  // those of the one before.
  struct LeavesOfBackward {
    std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> all;
    bool are_old = false;
  };

  // Returns the current step's recording, or null.
  std::shared_ptr<DeviceRecording> Current() const;
  // Returns whether the step has saved nothing.
  bool BeginStepIfNone();
  void BeginStep();
  // Returns whether any of these leaves has a gradient. The next backward may replace them.
  bool FindGradients();
  // Whether a minimum of at least that was logged.
  bool IsToldOfLeast(uint64_t least_bytes) const;
  // Logs a plan's minimum if it is above the target and all minima logged so far.
  void TellOfShortfall(const CachedPlan& cached);
  // Logs the first step that exceeded the target.
  void TellOfOvershoot();
  // Called before the step's first save. Replans candidates whose recording began with fewer
  // device bytes, adding the difference. A plan that fell short may fit a step that begins with
  // less: such a step is recorded again.
  void RaisePlans(const at::Tensor& tensor, uint64_t place);
  // Returns the plan of a step beside which weights reserve `wanted`.
  absl::StatusOr<std::shared_ptr<const CachedPlan>> Plan(StepTrace step, bool may_recompute,
                                                         const Reservation& wanted) const;
  // Plans steps again that took more between two accesses than their plans leave room for. Returns
  // whether any of them exceeded the target, and all of those fit now.
  bool LeaveRoom(const std::vector<PlannedSchedule::Grown>& grown);
  // Returns a plan of the same step with room for the growths; null if it falls short.
  std::shared_ptr<const CachedPlan> PlanWithRoom(const CachedPlan& cached,
                                                 absl::Span<const StepGrowth> growths,
                                                 const Reservation& wanted);
  // `log`: what the step did with its segments. `wanted`: what weights reserved beside it.
  void Learn(DeviceRecording& recording, bool had_gradients, const RecomputeTrials::SegmentLog& log,
             const Reservation& wanted);

  const c10::Device device_;
  const OffloadOptions& options_;
  const std::shared_ptr<StreamClock> clock_;
  const std::shared_ptr<DeviceShare> share_;
  OffloadState& state_;
  PlanMeter meter_;

  static constexpr size_t kMostLeaves = 8;
  std::atomic<bool> wants_leaves_ = true;    // fewer than kMostLeaves since the step began
  std::atomic<bool> has_gradients_ = false;  // at the step's beginning

  std::atomic<bool> is_first_ = false;  // the step began without any earlier plan

  mutable Mutex mu_;
  std::shared_ptr<DeviceRecording> recording_ ABSL_GUARDED_BY(mu_);
  uint64_t told_least_bytes_ ABSL_GUARDED_BY(mu_) = 0;   // the largest minimum logged
  bool told_of_overshoot_ ABSL_GUARDED_BY(mu_) = false;  // whether it was logged
  uint64_t raises_ ABSL_GUARDED_BY(mu_) = 0;  // calls of RaisePlans that found one to be off
  Reservation wanted_ ABSL_GUARDED_BY(mu_);   // by weights at the last step's beginning

  Mutex leaves_mu_;
  LeavesOfBackward leaves_ ABSL_GUARDED_BY(leaves_mu_);
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_STEP_LEARNER_H_
