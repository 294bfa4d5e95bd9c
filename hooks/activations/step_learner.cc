#include "pinion/hooks/activations/step_learner.h"

#include <algorithm>
#include <bit>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"
#include "pinion/engine/planner/liveness.h"
#include "pinion/engine/planner/plan_step.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/engine/schedule/plan_cache.h"
#include "pinion/engine/schedule/recompute_trials.h"
#include "pinion/hooks/autograd/tensor_checksum.h"
#include "pinion/hooks/autograd/torch_bridge.h"
#include "pinion/hooks/plan/noted_objects.h"
#include "pinion/hooks/plan/offload_policy.h"

namespace pinion {

std::shared_ptr<DeviceRecording> StepLearner::Current() const {
  MutexLock lock(mu_);
  return recording_;
}

bool StepLearner::IsCurious() const {
  if (state_.planner->memory_bytes().has_value() || Current() != nullptr || meter_.IsDue()) {
    return true;
  }
  OffloadLock lock(state_);
  return state_.schedule.target->WantsRecord();
}

std::optional<uint32_t> StepLearner::KeepSegment(const SegmentBegin& segment, ScopeId scope) {
  BeginStepIfNone();
  std::optional<uint32_t> kept;
  {
    OffloadLock lock(state_);
    kept = state_.schedule.target->OnSegment(scope);
  }
  const std::shared_ptr<DeviceRecording> recording = Current();
  if (kept.has_value() && recording != nullptr) {
    recording->NoteSegment(segment, *kept, options_.min_offload_bytes);
  }
  return kept;
}

std::vector<PlannedStep> StepLearner::PlannedSteps() const {
  std::list<std::shared_ptr<const CachedPlan>> cached;
  {
    OffloadLock lock(state_);
    cached = state_.schedule.target->cached();
  }
  std::vector<PlannedStep> steps;
  for (const auto& one : cached) steps.push_back(state_.planner->Shown(*one));
  return steps;
}

void StepLearner::OnDeviceBytes(int64_t allocated_bytes, int64_t added_bytes, const void* freed) {
  meter_.OnDeviceBytes(allocated_bytes, added_bytes,
                       static_cast<int64_t>(share_->streamed_bytes()));
  MutexLock lock(mu_);
  if (recording_ != nullptr) recording_->OnDeviceBytes(allocated_bytes, added_bytes, freed);
}

uint64_t StepLearner::NoteDeviceBytes() {
  AllocatorBytes bytes = AllocatorBytesOf(device_);
  bytes.streamed = static_cast<int64_t>(share_->streamed_bytes());
  bytes.streamed_allocated = static_cast<int64_t>(share_->allocated_bytes());
  const std::optional<PlanMeter::Growth> growth = meter_.NoteBytes(bytes);
  // Streamed weights may take all memory that the step leaves, so that the next time it lacks some.
  if (growth.has_value() && (growth->exceeds || share_->wanted().enough_bytes > 0)) {
    OffloadLock lock(state_);
    state_.schedule.target->OnGrowth(growth->size_bytes, growth->exceeds);
  }
  return static_cast<uint64_t>(bytes.current);
}

std::shared_ptr<DeviceRecording> StepLearner::BeginSave(const at::Tensor& tensor, uint64_t place) {
  if (BeginStepIfNone()) RaisePlans(tensor, place);
  std::shared_ptr<DeviceRecording> recording = Current();
  return recording != nullptr && recording->IsRecording() ? recording : nullptr;
}

void StepLearner::OnAccumulate(const at::Tensor& leaf) {
  if (!wants_leaves_) return;
  MutexLock lock(leaves_mu_);
  if (std::exchange(leaves_.are_old, false)) leaves_.all.clear();
  if (leaves_.all.size() < kMostLeaves) leaves_.all.emplace_back(leaf.getIntrusivePtr());
  wants_leaves_ = leaves_.all.size() < kMostLeaves;
}

bool StepLearner::FindGradients() {
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> leaves;
  {
    MutexLock lock(leaves_mu_);
    leaves = leaves_.all;
    leaves_.are_old = true;
  }
  wants_leaves_ = true;
  return std::any_of(leaves.begin(), leaves.end(), [](const auto& leaf) {
    const auto impl = leaf.lock();
    // Reads without a copy, since another thread may be setting the gradient.
    return impl != nullptr && impl->grad().defined();
  });
}

void StepLearner::EndScope(absl::FunctionRef<void()> end) {
  const std::shared_ptr<DeviceRecording> recording = Current();
  recording == nullptr ? end() : RunBeside({&recording, 1}, end);
  // After a step whose backward ran inside the scope, nothing of it is left to observe.
  if (!state_.planner->memory_bytes().has_value() || EndStepIfNone()) return;
  NoteDeviceBytes();
  OnUnobserved();
}

void StepLearner::OnUnobserved() {
  if (!state_.planner->memory_bytes().has_value()) return;
  if (const auto recording = Current()) recording->BeginUnobserved();
  meter_.BeginUnobserved();
}

bool StepLearner::EndStepIfNone() {
  {
    OffloadLock lock(state_);
    if (state_.schedule.target->HasBegun()) return false;
  }
  EndStep();
  return true;
}

bool StepLearner::BeginStepIfNone() {
  bool has_begun = false, has_saved = false;
  {
    OffloadLock lock(state_);
    has_begun = state_.schedule.target->HasBegun();
    has_saved = state_.schedule.target->IsInStep();
  }
  if (!has_begun) BeginStep();
  return !has_saved;
}

bool StepLearner::IsToldOfLeast(uint64_t least_bytes) const {
  MutexLock lock(mu_);
  return least_bytes <= told_least_bytes_;
}

void StepLearner::TellOfShortfall(const CachedPlan& cached) {
  {
    MutexLock lock(mu_);
    const uint64_t least_bytes = cached.plan().peak_bytes;
    if (cached.shortfall().ok() || least_bytes <= told_least_bytes_) return;
    told_least_bytes_ = least_bytes;
  }
  PINION_LOG(kError) << "OffloadOptions::memory_target_bytes cannot be met on " << device_.str()
                     << ", all leaves that can: " << cached.shortfall();
}

void StepLearner::TellOfOvershoot() {
  const PlanMeter::Overshoot overshoot = meter_.overshoot();
  {
    MutexLock lock(mu_);
    if (overshoot.steps == 0 || std::exchange(told_of_overshoot_, true)) return;
  }
  PINION_LOG(kWarning) << "a step of " << device_.str() << " had, or wanted, "
                       << overshoot.most_bytes << " bytes (" << HumanBytes(overshoot.most_bytes)
                       << ") more on the device than memory_target_bytes allows ("
                       << HumanBytes(*state_.planner->memory_bytes())
                       << "). OffloadStats::steps_over_target counts such steps from now on";
}

void StepLearner::TellOfRefusals() {
  if (!state_.planner->memory_bytes().has_value() || meter_.IsInStep()) return;
  if (!meter_.EndedByRefusal()) return;
  if (!is_first_) {
    TellOfOvershoot();
    return;
  }
  const AllocatorBytes bytes = AllocatorBytesOf(device_);
  const uint64_t target_bytes = *state_.planner->memory_bytes();
  PINION_LOG(kError) << "device memory ran out on " << device_.str()
                     << " in a first step, with everything offloaded that can be. "
                        "OffloadOptions::memory_target_bytes is "
                     << target_bytes << " (" << HumanBytes(target_bytes)
                     << "), the device had up to " << bytes.peak << " ("
                     << HumanBytes(static_cast<uint64_t>(bytes.peak))
                     << ") and refused more. If the step ended there, make the batch smaller, or "
                        "run it with more memory: then the log names the least";
}

void StepLearner::BeginStep() {
  std::shared_ptr<DeviceRecording> last;
  {
    MutexLock lock(mu_);
    last = recording_;
  }
  // An event recorded during a capture would become part of the graph.
  if (last != nullptr && !last->CheckNotCapturing().ok()) {
    OffloadLock lock(state_);
    state_.schedule.target->set_is_recorded(false);
    return;
  }
  RecomputeTrials::SegmentLog log;
  Reservation wanted;
  bool is_as_before = false, had_gradients = false;
  {
    // Another thread may have begun the step.
    MutexLock lock(mu_);
    if (recording_ != last) return;
    recording_.reset();
    had_gradients = has_gradients_;
    wanted = share_->wanted();
    is_as_before = std::exchange(wanted_, wanted) == wanted;
    OffloadLock state_lock(state_);
    state_.schedule.target->set_is_recorded(false);
    if (last != nullptr && !state_.schedule.target->HasBegun())
      log = state_.schedule.target->TakeSegmentLog();
    // A model was attached since, or has gone. Its weights may have left the device with that, or
    // come to it: a record from before, of the last step as well, counts them wrongly.
    if (!is_as_before) state_.schedule.target->ForgetPlans();
  }
  if (last != nullptr && is_as_before) Learn(*last, had_gradients, log, wanted);
  has_gradients_ = state_.planner->memory_bytes().has_value() && FindGradients();
  TellOfOvershoot();
  bool wants_record = false, is_any_cached = false;
  std::shared_ptr<const CachedPlan> followed;
  std::vector<PlannedSchedule::Grown> grown;
  {
    OffloadLock lock(state_);
    state_.schedule.target->set_begins_with_gradients(has_gradients_);
    grown = state_.schedule.target->TakeGrown();
    is_any_cached = !state_.schedule.target->cached().empty();
    wants_record = state_.schedule.target->WantsRecord();
    followed = state_.schedule.target->followed();
  }
  const bool has_room = LeaveRoom(grown);
  const std::optional<bool> is_off =
      meter_.BeginStep(followed, {.is_recorded = wants_record, .has_gradients = has_gradients_});
  is_first_ = !is_any_cached;
  if (is_off.has_value() && !has_room) {
    // Takes effect in the next step: whether this one is observed was decided by its first scope.
    OffloadLock lock(state_);
    state_.schedule.target->RecordAgain(/*with_gradients=*/*is_off);
  }
  if (!wants_record) return;
  auto next = std::make_shared<DeviceRecording>(device_, clock_, share_);
  next->Start();
  {
    MutexLock lock(mu_);
    // Another thread's recording is destroyed after the lock, with its events.
    recording_.swap(next);
  }
  OffloadLock lock(state_);
  state_.schedule.target->set_is_recorded(true);
}

absl::StatusOr<std::shared_ptr<const CachedPlan>> StepLearner::Plan(
    StepTrace step, bool may_recompute, const Reservation& wanted) const {
  Reservation reservation = wanted;
  if (options_.verify) {
    uint64_t largest_bytes = 0;
    for (const StepObject& object : step.objects) {
      largest_bytes = std::max(largest_bytes, object.size_bytes);
    }
    const uint64_t checksum_bytes = TensorChecksum::MostBytes(step.objects.size(), largest_bytes);
    reservation.least_bytes += checksum_bytes;
    reservation.enough_bytes += checksum_bytes;
  }
  return state_.planner->Plan(std::move(step), may_recompute, reservation, meter_.margin_bytes());
}

void StepLearner::RaisePlans(const at::Tensor& tensor, uint64_t place) {
  const std::optional<uint64_t> target_bytes = state_.planner->memory_bytes();
  if (!target_bytes.has_value()) return;
  const uint64_t size_bytes =
      ExtentToSave(ExtentOf(tensor), tensor.storage().nbytes()).size_bytes();
  const uint64_t signature = SignatureOf(tensor, place, size_bytes);
  // Streamed weights count before they are allocated.
  const auto all_bytes = static_cast<uint64_t>(AllocatedBytes(device_));
  const uint64_t device_bytes = all_bytes - std::min(all_bytes, share_->streamed_bytes());
  std::vector<std::shared_ptr<const CachedPlan>> too_low;
  bool is_off = false;
  {
    OffloadLock lock(state_);
    for (const std::shared_ptr<const CachedPlan>& cached : state_.schedule.target->cached()) {
      if (!cached->BeginsWith(signature) || !state_.schedule.target->MayBe(*cached)) continue;
      if (cached->FitsWith(device_bytes) == cached->shortfall().ok()) continue;
      is_off = true;
      // One that fell short may fit now. It is only recorded again: what the step began with may
      // not be what it lacked.
      if (cached->shortfall().ok()) too_low.push_back(cached);
    }
  }
  if (!is_off) return;
  const Reservation wanted = share_->wanted();
  for (const std::shared_ptr<const CachedPlan>& cached : too_low) {
    // Somewhat more, if that fits: a program that has a little more in each step is not to be
    // planned in each step.
    const uint64_t more_bytes = cached->ExcessBytes(device_bytes);
    const uint64_t least_bytes = LeastMemoryBytes(cached->step()).value_or(0) + more_bytes;
    if (least_bytes > *target_bytes && IsToldOfLeast(least_bytes)) continue;  // it falls short
    const auto plan_with = [&](uint64_t added_bytes) {
      StepTrace step = cached->step().WithMore(added_bytes);
      step.begins_with_gradients = has_gradients_;
      return Plan(std::move(step), /*may_recompute=*/false, wanted);
    };
    auto raised = plan_with(more_bytes + *target_bytes / 256);
    if (!raised.ok() || !(*raised)->shortfall().ok()) raised = plan_with(more_bytes);
    if (!raised.ok()) {
      PINION_LOG(kWarning) << "a step of " << device_.str() << " that begins with " << more_bytes
                           << " bytes more than before was not planned: " << raised.status();
      continue;
    }
    // That of a step which makes gradients counts them twice.
    if (cached->step().begins_with_gradients == has_gradients_) TellOfShortfall(**raised);
    OffloadLock lock(state_);
    state_.schedule.target->LearnRaised(*std::move(raised), *cached);
  }
  // The recording may count the same bytes again inside the step, as with first gradients. So
  // record the step again, at exponentially growing intervals.
  MutexLock lock(mu_);
  if (!std::has_single_bit(++raises_)) return;
  OffloadLock state_lock(state_);
  state_.schedule.target->RecordAgain(has_gradients_);
}

bool StepLearner::LeaveRoom(const std::vector<PlannedSchedule::Grown>& grown) {
  const Reservation wanted = share_->wanted();
  bool any_exceeds = false, all_fit = true;
  for (const auto& [cached, exceeding, fitting] : grown) {
    std::shared_ptr<const CachedPlan> now;
    {
      OffloadLock lock(state_);
      now = state_.schedule.target->FindLike(cached->step());
    }
    if (now == nullptr) continue;
    any_exceeds = any_exceeds || !exceeding.empty();
    std::shared_ptr<const CachedPlan> raised = now;
    if (!exceeding.empty()) {
      raised = PlanWithRoom(*now, exceeding, wanted);
      all_fit = all_fit && raised != nullptr;
    }
    if (raised == nullptr) continue;
    if (!fitting.empty()) raised = raised->WithGrowths(fitting);
    OffloadLock lock(state_);
    state_.schedule.target->LearnRaised(std::move(raised), *now);
  }
  return any_exceeds && all_fit;
}

std::shared_ptr<const CachedPlan> StepLearner::PlanWithRoom(const CachedPlan& cached,
                                                            absl::Span<const StepGrowth> growths,
                                                            const Reservation& wanted) {
  StepTrace step = cached.step();
  for (const StepGrowth& growth : growths) step.LeaveRoom(growth);
  const uint64_t least_bytes = LeastMemoryBytes(step).value_or(0);
  if (least_bytes > *state_.planner->memory_bytes() && IsToldOfLeast(least_bytes)) return nullptr;
  auto with_room = Plan(std::move(step), /*may_recompute=*/false, wanted);
  if (!with_room.ok()) return nullptr;
  TellOfShortfall(**with_room);
  // One that falls short would cost the steps without the growth their plan.
  return (*with_room)->shortfall().ok() ? *std::move(with_room) : nullptr;
}

void StepLearner::Learn(DeviceRecording& recording, bool had_gradients,
                        const RecomputeTrials::SegmentLog& log, const Reservation& wanted) {
  absl::StatusOr<StepTrace> step = recording.Finish();
  if (!step.ok()) {
    PINION_LOG(kWarning) << "a step of " << device_.str() << " was not recorded: " << step.status();
    return;
  }
  // A step of which nothing came back has no order of reading.
  const std::vector<ObjectLiveness> lives = LivenessOf(*step);
  const auto came_back = [](const ObjectLiveness& life) {
    return life.accesses.size() > life.saves;
  };
  if (std::none_of(lives.begin(), lives.end(), came_back)) return;
  step->begins_with_gradients = had_gradients;
  RecomputeTrials::Note(log, *step);
  bool may_recompute = false;
  std::shared_ptr<const CachedPlan> before;
  {
    OffloadLock lock(state_);
    may_recompute = state_.schedule.target->MayRecompute(log, *step);
    before = state_.schedule.target->FindLike(*step);
  }
  if (before != nullptr) step->TakeMostOf(before->step());
  absl::StatusOr<std::shared_ptr<const CachedPlan>> cached =
      Plan(*std::move(step), may_recompute, wanted);
  if (!cached.ok()) {
    PINION_LOG(kWarning) << "a step of " << device_.str()
                         << " was not planned: " << cached.status();
    return;
  }
  TellOfShortfall(**cached);
  MutexLock lock(mu_);
  if (wanted_ != wanted) return;  // another thread has begun a step and discarded the plans
  OffloadLock state_lock(state_);
  state_.schedule.target->Learn(*std::move(cached), log);
}

}  // namespace pinion
