// Records the steps of one device that its schedule does not know, and teaches it their plans. A
// plan that is found to be off is made again. Where a model is attached whose weights visit the
// device, or goes, all plans are forgotten: what a record counts as everybody else's bytes may be
// less or more by its weights, and the plans leave another part of the target.
//
// A step begins with the first tensor that is saved while nobody needs an earlier one. What the
// last step did is planned then, and not before: its last events are read, for which the host
// waits.
//
// A step that begins without gradients makes them: a first micro-batch. A step that begins with
// gradients adds to them: the micro-batches behind it. With a target in bytes the learner knows the
// two apart. It looks at the first leaves whose gradients the last backward made or added to. Until
// a step of the second kind was recorded, such a step follows the plan of the first kind, which
// takes more.
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
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/engine/planner/explain_plan.h"
#include "pinion/engine/schedule/recompute_trials.h"
#include "pinion/engine/schedule/set_aside.h"
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
  // The schedule in `state` goes by plans.
  StepLearner(c10::Device device, const OffloadOptions& options,
              const std::shared_ptr<DeviceTier>& tier, OffloadState& state)
      : device_(device),
        options_(options),
        clock_(
            std::make_shared<StreamClock>(std::shared_ptr<Device>(tier, &tier->engine().device()))),
        share_(tier->share()),
        state_(state),
        meter_(device, clock_, state.planner->memory_bytes()) {}

  // What `pack` makes of a tensor, which is recorded if the step is. `place` is the number of its
  // place in the scope; `pack` gets the number by which the schedule knows it. Null where `pack`
  // says so: the tensor stays what it is.
  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, uint64_t place, bool is_leaf,
                                    absl::FunctionRef<std::unique_ptr<SavedTensor>(uint64_t)> pack);
  // As MemoryObserver::OnAccumulate.
  void OnAccumulate(const at::Tensor& leaf);
  // As SavedTensorPacker::KeepSegment.
  std::optional<uint32_t> KeepSegment(const SegmentBegin& segment, ScopeId scope);
  // Runs `work`, which is no part of the step.
  void RunAside(absl::FunctionRef<void()> work);

  // A scope has ended. What the program does until a backward reads, as with a loss behind the
  // scope, is not told to OnDeviceBytes.
  void BeginUnobserved();
  // A tensor is about to be read, or saved.
  void EndUnobserved();

  // The steps that are known, with their plans. The one that ran last comes first.
  std::vector<PlannedStep> PlannedSteps() const;

  // Nobody needs a tensor of the step any more.
  void EndStep() {
    meter_.EndStep();
    observed_peak_bytes_ = kObserved;
  }
  // Where a step has ended in which memory ran out, and no step was known by then: in the log, the
  // target and what the device had.
  void TellOfRefusals();
  PlanMeter::Overshoot overshoot() const { return meter_.overshoot(); }

  // Peaks are of use: there is a target in bytes, a step is recorded or measured, or the next one's
  // record would be of use.
  bool IsCurious() const;
  void OnDeviceBytes(int64_t allocated_bytes, const void* freed);
  // At a save or a read, whether somebody observes what lies between them or not.
  void NoteDeviceBytes(uint64_t allocated_bytes) {
    meter_.CompareWithTarget(static_cast<int64_t>(allocated_bytes));
  }

 private:
  // The leaves to which the last backward added first; of the step before, until there is one.
  struct LeavesOfBackward {
    std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> all;
    bool are_old = false;
  };

  // The record of the step that runs; null: it is not recorded.
  std::shared_ptr<DeviceRecording> Current() const;
  // True if the step has saved nothing yet.
  bool BeginStepIfNone();
  void BeginStep();
  // Whether any of the leaves has a gradient by now. From now on others may be noted.
  bool FindGradients();
  // In the log: each least that is more than those before, and once that a step had more.
  void TellOfShortfall(const CachedPlan& cached);
  void TellOfOvershoot();
  // The step's first tensor is about to be saved. Plans that it may go on by, and whose records had
  // less on the device by now than there is, are made anew with the difference.
  void RaisePlans(const at::Tensor& tensor, uint64_t place);
  // The plan of a step; `wanted` by weights.
  absl::StatusOr<std::shared_ptr<const CachedPlan>> Plan(StepTrace step, bool may_recompute,
                                                         const SetAside& wanted) const;
  // `log`: what that step has done with its segments. `wanted`: by weights, beside it.
  void Learn(DeviceRecording& recording, bool had_gradients, const RecomputeTrials::SegmentLog& log,
             const SetAside& wanted);

  const c10::Device device_;
  const OffloadOptions& options_;
  const std::shared_ptr<StreamClock> clock_;
  const std::shared_ptr<DeviceShare> share_;
  OffloadState& state_;
  PlanMeter meter_;

  static constexpr size_t kMostLeaves = 8;
  std::atomic<bool> wants_leaves_ = true;    // fewer were noted since the step began
  std::atomic<bool> has_gradients_ = false;  // when the step began

  static constexpr int64_t kNothingToTell = INT64_MAX;
  // By the allocator, when a step began before which none was known.
  std::atomic<int64_t> refusals_ = kNothingToTell;

  static constexpr int64_t kObserved = INT64_MAX;
  std::atomic<int64_t> observed_peak_bytes_ = kObserved;  // the allocator's, when a scope ended

  mutable Mutex mu_;
  std::shared_ptr<DeviceRecording> recording_ ABSL_GUARDED_BY(mu_);
  uint64_t told_least_bytes_ ABSL_GUARDED_BY(mu_) = 0;   // the largest least in the log
  bool told_of_overshoot_ ABSL_GUARDED_BY(mu_) = false;  // in the log
  uint64_t raises_ ABSL_GUARDED_BY(mu_) = 0;             // of plans
  SetAside wanted_ ABSL_GUARDED_BY(mu_);                 // by weights, when the last step began

  Mutex leaves_mu_;
  LeavesOfBackward leaves_ ABSL_GUARDED_BY(leaves_mu_);
};

}  // namespace pinion

#endif  // PINION_HOOKS_ACTIVATIONS_STEP_LEARNER_H_
