// Runs steps by plans: recognises recorded steps, and executes their plans within a memory target.
//
//   PlannedSchedule schedule({.memory_bytes = target, .link = link});
//   ... a step runs; schedule.WantsRecord() says whether to record it ...
//   // Takes a while: call it without a lock.
//   PINION_ASSIGN_OR_RETURN(auto cached, schedule.Plan(trace));
//   schedule.Learn(std::move(cached));
//
// A step lasts from the first saved tensor until no saved tensor is needed. A recognised step runs
// by its plan. Tensors that the plan moves are copied out as soon as possible, or when the plan
// says so. The plan names the access at which each is evicted, and the access from which it is
// fetched. Fetches that are due go in the order of StepPlan::moves. All other tensors stay resident
// and are not copied.
//
// The plan is a preference, the target is a rule. Before each access the schedule adds two numbers:
// the bytes that the allocator has given out, and the most that the recorded step allocated until
// the next access. If a step leaves accesses out, the second number is the maximum over all
// accesses. If the sum exceeds the target, the schedule evicts in this order:
//
//   1. tensors that were copied out, oldest first
//   2. prefetched tensors
//   3. tensors that the plan keeps, farthest next access first
//
// A tensor that is about to be read stays. Nothing is prefetched meanwhile. Streamed weights give
// way to the plan: beside them the limit is the plan's peak plus these weights, if that exceeds the
// target. Only tensors of the first kind are evicted for them. Idle weights are evicted if the sum
// exceeds the target.
//
// Without a plan, but with a target, a step takes the least memory possible. All tensors are
// offloaded, each is evicted as soon as its copy is submitted, and nothing is prefetched. A fetched
// tensor is freed at the next access. The step and its backward begin without idle weights. This
// holds for the first step, and for steps that do not fit in the target. Without a target such
// steps run by windows.
//
// A step may allocate more between two accesses than its record did, for example in one step of
// four, and exceed the target. If it fits this time, streamed weights may take that room before the
// next time. The owner tells the schedule (OnGrowth), and learns the step again with as much room
// (TakeGrown).
//
// A step may turn out to be another one than recognised. It saves or reads something else, or still
// needs an object that the plan has released. The schedule notices at the next access at the
// latest. Until then it leaves room for each cached step that begins alike. The step then follows
// another cached plan that matches so far. If there is none, it continues without a plan, and
// resident tensors are offloaded as well. If it exceeded the target just before, the next steps may
// go on longer, too. While they save, they leave the largest room that they needed so far.
//
// Recomputable segments are kept unless a plan recomputes them (recompute_trials.h). A step may
// begin with a segment, before anything is saved.
//
// StepMatcher knows how far the step has come, ResidencyTracker where its objects are, and
// PlanCursor which moves are due. This class makes the decisions.
//
// Thread safety: none.

#ifndef PINION_ENGINE_SCHEDULE_PLANNED_SCHEDULE_H_
#define PINION_ENGINE_SCHEDULE_PLANNED_SCHEDULE_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/explain_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/engine/schedule/offload_schedule.h"
#include "pinion/engine/schedule/plan_cache.h"
#include "pinion/engine/schedule/recompute_trials.h"
#include "pinion/engine/schedule/reservation.h"
#include "pinion/engine/schedule/residency_tracker.h"
#include "pinion/engine/schedule/step_matcher.h"

namespace pinion {

struct TargetOptions {
  // Limit for the device's allocations. Empty: the least memory with which a step takes at most
  // kMaxSlowdown times its compute (plan_step.h).
  std::optional<uint64_t> memory_bytes = std::nullopt;
  WindowOptions windows = {};  // of unrecognised steps, without memory_bytes
  LinkCalibration link = {};
};

class PlannedSchedule final : public OffloadSchedule {
 public:
  static constexpr size_t kMaxCached = PlanCache::kMax;
  static constexpr int kKnownInARow = RecordingBackoff::kKnownInARow;
  static constexpr int kKnownInARowForRecompute = RecordingBackoff::kKnownInARowForRecompute;

  explicit PlannedSchedule(const TargetOptions& options);

  // What the last step did with its segments. Take it before the next step begins.
  RecomputeTrials::SegmentLog TakeSegmentLog() { return trials_.TakeSegmentLog(); }
  // Whether a plan of the step may recompute segments (RecomputeTrials::MayRecompute).
  bool MayRecompute(const RecomputeTrials::SegmentLog& log, const StepTrace& step) const {
    return trials_.MayRecompute(log, step, cache_);
  }
  // The plan that Learn will replace by that of the recorded step; null without one.
  std::shared_ptr<const CachedPlan> FindLike(const StepTrace& step) const {
    return cache_.FindLike(step);
  }
  // Plans a recorded step, for Learn (MakeCachedPlan). A pure function of the options: no lock is
  // needed. `reservation`: for memory that the trace leaves out. `margin_bytes`: PlanValidator's.
  absl::StatusOr<std::shared_ptr<const CachedPlan>> Plan(StepTrace step, bool may_recompute = false,
                                                         const Reservation& reservation = {},
                                                         uint64_t margin_bytes = 0) const {
    return MakeCachedPlan(std::move(step), options_.memory_bytes, options_.link, may_recompute,
                          reservation, margin_bytes);
  }
  // While a step runs as planned: an upper bound of what its trace counts. It has three parts: the
  // plan's peak; what the step began with beyond its trace; objects that should be offloaded, and
  // are still resident or externally referenced. If other plans match so far, the largest counts.
  std::optional<PeakBound> StepPeakBound() const;
  // The parcel was evicted, but the object's memory is externally referenced.
  void OnNotFreed(uint32_t object) { residency_.OnNotFreed(object, matcher_.now()); }
  void Learn(std::shared_ptr<const CachedPlan> cached,
             const RecomputeTrials::SegmentLog& log = {}) {
    trials_.Learn(log, std::move(cached), cache_);
  }
  // Replaces the plan of `cached` by `raised`, a plan of the same trace with more on the device.
  void LearnRaised(std::shared_ptr<const CachedPlan> raised, const CachedPlan& cached) {
    cache_.Learn(cached.recompute_was_tried() ? raised->WithRecomputeTried() : std::move(raised));
  }
  // Discards all plans, since they are outdated. Steps are recorded again when they recur. A
  // running step continues as planned.
  void ForgetPlans() { cache_ = PlanCache(); }
  // Whether the step that begins next is recorded. Only a recorded step tries recomputation.
  void set_is_recorded(bool is_recorded) { is_recorded_ = is_recorded; }
  // Whether the step that begins next adds to gradients. It follows a plan of that kind, if there
  // is one.
  void set_begins_with_gradients(bool begins) { cache_.set_begins_with_gradients(begins); }
  // Whether a step that begins now may follow that plan.
  bool MayBe(const CachedPlan& cached) const { return cache_.MayBe(cached); }
  // A recomputable segment begins in a scope. Returns its ordinal if it is kept; empty: recompute
  // it.
  std::optional<uint32_t> OnSegment(ScopeId scope);
  // Whether to record the next step, because the last one or a recent one was not recognised.
  // Several kinds of steps may alternate. After kMaxCached unrecognised ones in a row, fewer steps
  // are recorded. More are recorded while a cached plan waits for a trial of recomputation.
  bool WantsRecord() const { return backoffs_[cache_.begins_with_gradients()].WantsRecord(cache_); }
  // A plan is outdated: the next steps that add to gradients, or that create them, are worth
  // recording.
  void RecordAgain(bool with_gradients) { backoffs_[with_gradients].RecordAgain(); }
  // Returns a cached plan with all that describes it. A pure function of the options: no lock is
  // needed.
  PlannedStep Shown(const CachedPlan& cached) const {
    return {.step = cached.step(),
            .plan = cached.plan(),
            .link = options_.link,
            .limit_bytes = options_.memory_bytes.value_or(cached.plan().peak_bytes),
            .note = cached.note()};
  }
  // Whether any saved tensor is needed.
  bool IsInStep() const { return matcher_.IsRunning(); }
  // The same, or a step has begun with a segment and saved nothing yet.
  bool HasBegun() const { return IsInStep() || trials_.has_early(); }
  // The plan of the running or last step; null: it runs without one.
  const std::shared_ptr<const CachedPlan>& followed() const { return matcher_.followed(); }
  // In the order of PlanCache.
  const std::list<std::shared_ptr<const CachedPlan>>& cached() const { return cache_.all(); }

  // The target in bytes, if there is one. No lock is needed.
  std::optional<uint64_t> memory_bytes() const { return options_.memory_bytes; }
  bool AsksForDeviceBytes() const override { return options_.memory_bytes.has_value(); }
  // Whether the running planned step will exceed the target, by the last device bytes.
  bool LacksBytes() const { return IsPlanned() && MissingFor(awaited_bytes_).bytes > 0; }
  // Whether it will even if all saved tensors leave that are to.
  bool LacksBytesWithWeights() const;
  // `growth_bytes`: the most that memory without streamed weights grew since the last access, which
  // may be that of the step before, had evicted and fetched what it was to. Call it before the next
  // access, if the device `exceeds` the target since, or might another time.
  void OnGrowth(uint64_t growth_bytes, bool exceeds);
  struct Grown {
    std::shared_ptr<const CachedPlan> cached;
    std::vector<StepGrowth> exceeding;
    std::vector<StepGrowth> fitting;  // the step needs no other plan for them
  };
  // Returns plans of which that was more than they leave room for, once.
  std::vector<Grown> TakeGrown() { return std::exchange(grown_, {}); }
  // For DeviceShare::EvictIdleWeights.
  struct WeightsBeside {
    uint64_t most_bytes = UINT64_MAX;
    bool unless_in_use = false;
  };
  // Returns the streamed weights that fit beside the running step until its next access, by the
  // last device bytes. When a step or its backward begins without a plan, returns none, once.
  WeightsBeside TakeWeightsBeside();
  void OnDeviceBytes(uint64_t size_bytes, uint64_t streamed_bytes) override {
    device_bytes_ = size_bytes;
    streamed_bytes_ = streamed_bytes;
  }
  SaveDecision OnSaved(ScopeId scope, const SavedObject& saved) override;
  void OnUsed(uint32_t id, AccessKind access) override;
  void OnRecast(uint32_t id) override { awaited_bytes_ = residency_.SizeBytes(id); }
  void OnReleased(uint32_t object) override;
  void OnScopeEnd(ScopeId scope) override {
    OffloadSchedule::OnScopeEnd(scope);
    if (!IsInStep() && scope == early_scope_) trials_.ForgetEarly();
  }
  void OnLeft(ScheduledParcel& parcel, absl::Span<const HeldBytes> held) override;
  bool OnGone(ScheduledParcel& parcel) override;
  void OnBackwardBegin(int64_t backward) override {
    OffloadSchedule::OnBackwardBegin(backward);
    begins_unplanned_ |= IsInStep() && !IsPlanned();
  }
  void OnFetched(ScheduledParcel& parcel, int64_t backward) override;
  // In a retained graph. False for shared parcels, which are not freed and fetched again.
  bool StaysFetched(const ScheduledParcel& parcel) const override {
    return residency_.StaysFetched(parcel);
  }
  bool OnDropped(ScheduledParcel& parcel) override;
  void OnFetchesRefused(absl::Span<ScheduledParcel* const> parcels) override;
  void OnRoomWanted() override;

  uint64_t BatchBytes() const override { return IsPlanned() ? 0 : OffloadSchedule::BatchBytes(); }
  uint64_t LateBytes() const override { return IsPlanned() ? 0 : OffloadSchedule::LateBytes(); }
  uint64_t BatchKey(uint32_t object) const override;
  std::vector<uint32_t> TakeDeferredOffloads() override;
  ScheduledParcels TakeEvictions() override;
  ScheduledParcels TakeAllEvictions() override {
    all_leave_ = true;
    return OffloadSchedule::TakeAllEvictions();
  }
  Fetches TakeFetches(const SavedPlace& from, int64_t backward,
                      absl::FunctionRef<bool(const ScheduledParcel&)> is_away) override;
  std::vector<ScheduledParcel*> FetchedAhead() const override;
  std::vector<ScheduledParcel*> FetchedIn(int64_t backward) const override;

 private:
  bool IsPlanned() const { return followed() != nullptr; }
  RecordingBackoff& Backoff() { return backoffs_[cache_.begins_with_gradients()]; }
  // Follows the cached plan that matches so far, if there is one. A step that `begins` may try
  // recomputation instead.
  void FindCached(bool begins);
  // Whether the plan keeps the object resident until its next access, and there is one.
  bool IsResidentUntilNextAccess(uint32_t object) const {
    return followed()->IsResidentUntilNextAccess(matcher_.planned(object), matcher_.now());
  }
  // By the plan; SIZE_MAX: never.
  size_t NextAccessOf(uint32_t id) const {
    return followed()->NextAccess(matcher_.planned(id), matcher_.now()).value_or(SIZE_MAX);
  }
  // Appends objects that the plan keeps, if what was offloaded so far is less than the device
  // lacks: those that free memory now, farthest next access first.
  void ChooseForTarget(std::vector<uint32_t>& deferred);
  // TakeEvictions without a plan, but with a target: all that can be evicted.
  ScheduledParcels TakeUnplanned();
  // Calls `visit` with the followed plan, and all that begin alike and have not differed yet.
  void ForEachPossible(absl::FunctionRef<void(const CachedPlan&)> visit) const;
  // Whether another plan that fits began alike, and the step leaves nothing of it out.
  bool IsAnotherWithoutSkips() const;
  // Small objects share a key if each plan that the step may follow moves them together.
  uint64_t SmallBatchKey(uint32_t id) const;
  // Marks what the plan has evicted by now.
  void EvictAsPlanned();
  // Evicts offloaded and then prefetched parcels, as many bytes as the device lacks until the next
  // access.
  ScheduledParcels TakeMissing();
  // Prefetched parcels that were not read, with their next access, the farthest first.
  std::vector<std::pair<size_t, ScheduledParcel*>> Unread() const;
  // TakeFetches by a plan.
  Fetches TakePlannedFetch(absl::FunctionRef<bool(const ScheduledParcel&)> is_away);
  // Bytes that the device lacks for `more_bytes` and what the step allocates before its next
  // access.
  struct Missing {
    uint64_t bytes = 0;                // if streamed weights give way to the plan
    uint64_t beyond_target_bytes = 0;  // if they do not
    uint64_t most() const { return std::max(bytes, beyond_target_bytes); }
  };
  Missing MissingFor(uint64_t more_bytes) const;
  // The most that memory may grow until the next access.
  uint64_t GrowthBytes() const;
  // What is evicted without being chosen for the target.
  uint64_t LeavingBytes() const;

  const TargetOptions options_;
  const uint64_t small_bytes_;  // tensors of at most this size share parcels
  PlanCache cache_;
  RecomputeTrials trials_;
  std::array<RecordingBackoff, 2>
      backoffs_;              // of steps that create gradients, and that add to them
  bool is_recorded_ = false;  // of the step that begins next, or runs
  ScopeId early_scope_ = 0;   // the scope in which a step began with a segment last
  uint64_t device_bytes_ = 0;
  uint64_t streamed_bytes_ = 0;  // streamed weights among these
  // Bytes that the reader of the last accessed object is about to fetch or recast.
  uint64_t awaited_bytes_ = 0;
  std::vector<Grown> grown_;
  bool steps_vary_ = false;  // one has exceeded the target before it differed from its plan

  // --- of the running step ---
  StepMatcher matcher_;  // may follow no plan
  ResidencyTracker residency_;
  PlanCursor cursor_;  // of the followed plan
  // Other plans of steps that begin like the followed one, with the number of accesses alike.
  std::vector<std::pair<std::shared_ptr<const CachedPlan>, size_t>> alike_;
  uint64_t begin_bytes_ = 0;       // on the device without streamed weights, when the step began
  bool is_lost_ = false;           // no cached plan matches
  bool has_deferred_ = false;      // resident objects may have to be offloaded
  bool begins_unplanned_ = false;  // the step or its backward, without a plan
  bool all_leave_ = false;         // deferred copies are due now
  std::optional<size_t> exceeded_at_;  // the last access before the target was exceeded
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_PLANNED_SCHEDULE_H_
