// A schedule by plans: steps that were recorded are known again, and run as planned.
//
//   PlannedSchedule schedule({.memory_bytes = target, .link = link});
//   ... a step runs; schedule.WantsRecord() says that it is worth recording ...
//   PINION_ASSIGN_OR_RETURN(CachedPlan known, schedule.Plan(step));     // takes a while: no lock
//   schedule.Learn(std::move(known));
//
// A step lasts from the first tensor that is saved until nobody needs any of them. A recorded step
// runs by its plan. Tensors that the plan moves are copied out as soon as possible, or behind
// others where the plan says so. The plan names the use at which each is evicted, and the use from
// which on it is fetched. All other tensors stay and are not copied.
//
// The plan is a preference, the target is a rule. Before each use the schedule adds two numbers:
// what the allocator has given out, and the most that the recorded step allocated until the next
// use. For a step that leaves uses of its record out, the second is the most between any two
// uses. Where the sum exceeds the target, the schedule evicts what was copied out, oldest first,
// then what was fetched for later, then what the plan keeps, farthest next use first. What is about
// to be read stays. Nothing is fetched ahead meanwhile. Beside weights that visit the device the
// limit is the plan's peak plus these weights, if that is more than the target: weights give way to
// the plan. Only what was copied out, and would go anyway, goes for them.
//
// A step without a plan takes the least memory possible, if there is a target: all tensors leave,
// each is evicted as soon as its copy is submitted, and nothing is fetched ahead. A fetched tensor
// is dropped at the next use. The first step runs like this, and a step that is known to need more
// than the target. Without a target they run by windows.
//
// A step may turn out to differ from the known one that it followed: it saves or reads something
// else, or still needs an object that the known step has released. The schedule sees that at the
// next use at the latest. The step goes on as another known step that begins in the same way. If
// there is none, it goes on without a plan, and tensors that have stayed leave as well.
//
// Segments that can be computed again are kept, unless a plan within a target computes them again
// (recompute_trials.h). A step may begin with one, before anything is saved.
//
// How far the step has come in the known one is StepMatcher's, where its objects are
// ResidencyTracker's and what the plan has come to PlanCursor's. This class decides: it alone knows
// all three, the windows and the target.
//
// Thread safety: none.

#ifndef PINION_ENGINE_SCHEDULE_PLANNED_SCHEDULE_H_
#define PINION_ENGINE_SCHEDULE_PLANNED_SCHEDULE_H_

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
#include "pinion/engine/schedule/cached_plan.h"
#include "pinion/engine/schedule/offload_schedule.h"
#include "pinion/engine/schedule/plan_cache.h"
#include "pinion/engine/schedule/recompute_trials.h"
#include "pinion/engine/schedule/residency_tracker.h"
#include "pinion/engine/schedule/set_aside.h"
#include "pinion/engine/schedule/step_matcher.h"
#include "pinion/engine/schedule/window_schedule.h"

namespace pinion {

struct TargetOptions {
  static constexpr double kSlowdown = 1.01;

  // All that may be allocated on the device; none: the least with which a step takes at most
  // kSlowdown times its compute.
  std::optional<uint64_t> memory_bytes = std::nullopt;
  WindowOptions windows = {};  // of steps that are not known, without memory_bytes
  LinkCalibration link = {};
};

class PlannedSchedule final : public OffloadSchedule {
 public:
  static constexpr size_t kMaxCached = PlanCache::kMax;
  static constexpr int kKnownInARow = RecordingBackoff::kKnownInARow;
  static constexpr int kKnownInARowForRecompute = RecordingBackoff::kKnownInARowForRecompute;

  explicit PlannedSchedule(const TargetOptions& options);

  // What the last step has done with its segments, for its record and its plan; to be taken before
  // the next step begins.
  RecomputeTrials::SegmentLog TakeSegmentLog() { return trials_.TakeSegmentLog(); }
  // Whether a plan of the step may be a mix (RecomputeTrials::MayRecompute).
  bool MayRecompute(const RecomputeTrials::SegmentLog& log, const StepTrace& step) const {
    return trials_.MayRecompute(log, step, cache_);
  }
  // The plan of a step, for Learn: of the least memory that can be where that is more than the
  // target, which CachedPlan::shortfall() then says. A pure function of the options: no lock is
  // needed. `mixes`: looks for segments to compute again as well. `aside`: of the target, for what
  // the step's record leaves out. `margin_bytes`: PlanValidator's.
  absl::StatusOr<std::shared_ptr<const CachedPlan>> Plan(StepTrace step, bool may_recompute = false,
                                                         const SetAside& aside = {},
                                                         uint64_t margin_bytes = 0) const {
    return MakeCachedPlan(std::move(step), options_.memory_bytes, TargetOptions::kSlowdown,
                          options_.link, may_recompute, aside, margin_bytes);
  }
  // While a step runs as planned: the most that its record counts. That is the plan's peak plus
  // some saved bytes: those of objects that the plan has evicted by now and that are on the device
  // all the same. They have not left yet, or others hold them.
  std::optional<StepPromise> Promise() const {
    if (!IsInStep() || !IsPlanned()) return std::nullopt;
    const StepPlan& plan = followed()->plan();
    return StepPromise{.most_bytes = plan.peak_bytes + residency_.overdue_bytes(),
                       .moves = !plan.moves.empty()};
  }
  // Its parcel was evicted, and others hold the object's memory as well.
  void OnNotFreed(uint32_t object) { residency_.OnNotFreed(object, matcher_.now()); }
  void Learn(std::shared_ptr<const CachedPlan> cached,
             const RecomputeTrials::SegmentLog& log = {}) {
    trials_.Learn(log, std::move(cached), cache_);
  }
  // `raised` is planned of the record of `known`, with more on the device.
  void LearnRaised(std::shared_ptr<const CachedPlan> raised, const CachedPlan& cached) {
    cache_.Learn(cached.recompute_was_tried() ? raised->WithRecomputeTried() : std::move(raised));
  }
  // What is known of any step is wrong: each is recorded again when it comes once more. A step that
  // runs goes on as it was planned.
  void ForgetPlans() { cache_ = PlanCache(); }
  // Whether the step that begins next is recorded: only such a one tries a mix.
  void set_is_recorded(bool is_recorded) { is_recorded_ = is_recorded; }
  // The step that begins next adds to gradients: it goes on as a known one that does, too, if there
  // is one.
  void set_begins_with_gradients(bool begins) { cache_.set_begins_with_gradients(begins); }
  // Whether a step that begins now may go on as that one.
  bool MayBe(const CachedPlan& cached) const { return cache_.MayBe(cached); }
  // A segment that can be computed again begins in a scope: its ordinal if it is kept. Nothing: it
  // is computed again.
  std::optional<uint32_t> OnSegment(ScopeId scope);
  // A step was not known, the last one or shortly before: where steps of several kinds take turns,
  // the next one may be new as well. After kMaxCached unknown ones in a row, less and less often.
  // Where a known one has yet to be recorded for its mix, which of them begins is not known: some
  // more are.
  bool WantsRecord() const { return backoffs_[cache_.begins_with_gradients()].WantsRecord(cache_); }
  // What is known of a step is no longer right: the next two are worth recording. The first of them
  // may have begun without.
  void RecordAgain() { Backoff().RecordAgain(); }
  // A known step, to be shown to people. A pure function of the options: no lock is needed.
  PlannedStep Shown(const CachedPlan& cached) const {
    return {.step = cached.step(),
            .plan = cached.plan(),
            .link = options_.link,
            .limit_bytes = options_.memory_bytes.value_or(cached.plan().peak_bytes),
            .note = cached.note()};
  }
  // Somebody needs a tensor that was saved.
  bool IsInStep() const { return matcher_.IsRunning(); }
  // Or it begins with a segment that has saved nothing yet.
  bool HasBegun() const { return IsInStep() || trials_.has_early(); }
  // What the step that runs, or the last one, goes on as; null: it runs like the first.
  const std::shared_ptr<const CachedPlan>& followed() const { return matcher_.followed(); }
  // The last one that was followed comes first.
  const std::list<std::shared_ptr<const CachedPlan>>& cached() const { return cache_.all(); }

  // The target, if it is one in bytes. No lock is needed.
  std::optional<uint64_t> memory_bytes() const { return options_.memory_bytes; }
  bool AsksForDeviceBytes() const override { return options_.memory_bytes.has_value(); }
  // By what was told last, the step that runs as planned will exceed the target.
  bool LacksBytes() const { return IsPlanned() && MissingFor(awaited_bytes_).bytes > 0; }
  void OnDeviceBytes(uint64_t size_bytes, uint64_t visiting_bytes) override {
    device_bytes_ = size_bytes;
    visiting_bytes_ = visiting_bytes;
  }
  SaveDecision OnSaved(ScopeId scope, const SavedObject& saved) override;
  void OnUsed(uint32_t id, AccessKind access) override;
  void OnRecast(uint32_t id) override { awaited_bytes_ = residency_.SizeBytes(id); }
  void OnReleased(uint32_t object) override;
  void OnScopeEnd(ScopeId scope) override {
    window_.OnScopeEnd(scope);
    if (!IsInStep() && scope == early_scope_) trials_.ForgetEarly();
  }
  void OnLeft(ScheduledParcel& parcel, absl::Span<const HeldBytes> held) override;
  void OnSavedAgain(ScheduledParcel& parcel, const SavedPlace& place) override {
    window_.OnSavedAgain(parcel, place);
  }
  void OnPieceGone(ScheduledParcel& parcel, const void* owner) override {
    window_.OnPieceGone(parcel, owner);
  }
  bool OnGone(ScheduledParcel& parcel) override;
  void OnBackwardBegin(int64_t backward) override { window_.OnBackwardBegin(backward); }
  void OnBackwardEnd(int64_t backward) override { window_.OnBackwardEnd(backward); }
  void OnFetched(ScheduledParcel& parcel, int64_t backward) override;
  bool OnRead(ScheduledParcel& parcel) override { return window_.OnRead(parcel); }
  // In a graph that is kept. Nothing that shares a parcel, which is not dropped once more.
  bool StaysFetched(const ScheduledParcel& parcel) const override {
    return residency_.StaysFetched(parcel);
  }
  bool OnDropped(ScheduledParcel& parcel) override;
  void OnFetchesMade(bool room_was_made) override { window_.OnFetchesMade(room_was_made); }
  void OnFetchesRefused(absl::Span<ScheduledParcel* const> parcels) override;
  void OnRoomWanted() override;

  uint64_t BatchBytes() const override { return IsPlanned() ? 0 : window_.BatchBytes(); }
  uint64_t LateBytes() const override { return IsPlanned() ? 0 : window_.LateBytes(); }
  uint64_t BatchKey(uint32_t object) const override;
  std::vector<uint32_t> TakeDeferredOffloads() override;
  ScheduledParcels TakeEvictions() override;
  ScheduledParcels TakeAllEvictions() override {
    all_leave_ = true;
    return window_.TakeAllEvictions();
  }
  Fetches TakeFetches(const SavedPlace& from, int64_t backward,
                      absl::FunctionRef<bool(const ScheduledParcel&)> is_away) override;
  std::vector<ScheduledParcel*> FetchedAhead() const override;
  std::vector<ScheduledParcel*> FetchedIn(int64_t backward) const override;

 private:
  bool IsPlanned() const { return followed() != nullptr; }
  RecordingBackoff& Backoff() { return backoffs_[cache_.begins_with_gradients()]; }
  // Goes on with the known step that all so far fits, if there is one. A step that `begins` may try
  // its mix instead.
  void FindCached(bool begins);
  // By the plan, the object is on the device until its next use, and there is one.
  bool IsResidentUntilNextAccess(uint32_t object) const {
    return followed()->IsResidentUntilNextAccess(matcher_.planned(object), matcher_.now());
  }
  // By the known step; SIZE_MAX: nobody reads it any more.
  size_t NextAccessOf(uint32_t id) const {
    return followed()->NextAccess(matcher_.planned(id), matcher_.now()).value_or(SIZE_MAX);
  }
  // Adds to `late` what the plan keeps, where all that has left by then is too little for what the
  // device lacks: of what frees memory now, what is used last.
  void OffloadForTarget(std::vector<uint32_t>& late);
  // TakeEvictions, within a target that no plan is known for: all that can go.
  ScheduledParcels TakeUnplanned();
  // What the plan lets go of by now is wanted away.
  void EvictAsPlanned();
  // So much of what has left, and then of what was fetched for later, as the device lacks for what
  // comes until the next use.
  ScheduledParcels TakeMissing();
  // What was fetched and its next reader has not asked for, with its next use: first the last one.
  std::vector<std::pair<size_t, ScheduledParcel*>> Unread() const;
  // TakeFetches, where a plan says what to fetch.
  Fetches TakePlannedFetch(absl::FunctionRef<bool(const ScheduledParcel&)> is_away);
  // What the device lacks for so much more, and for what the step will ask for before its next use.
  struct Missing {
    uint64_t bytes = 0;                // where weights that visit give way to what was planned
    uint64_t with_visitors_bytes = 0;  // where they stay
  };
  Missing MissingFor(uint64_t more_bytes) const;

  const TargetOptions options_;
  const uint64_t small_bytes_;  // tensors of at most so much share parcels
  WindowSchedule window_;
  PlanCache cache_;
  RecomputeTrials trials_;
  std::array<RecordingBackoff, 2> backoffs_;  // of steps that make gradients, and that add to them
  bool is_recorded_ = false;                  // the step that begins next, or runs
  ScopeId early_scope_ = 0;                   // in which a step has begun last with a segment
  uint64_t device_bytes_ = 0;
  uint64_t visiting_bytes_ = 0;  // of these, weights' that come and go
  // That are about to be fetched or computed, by the reader of what was used last.
  uint64_t awaited_bytes_ = 0;

  // --- of the step that runs ---
  StepMatcher matcher_;  // following none, it runs like the first
  ResidencyTracker residency_;
  PlanCursor cursor_;       // of the plan that is followed
  bool is_lost_ = false;    // nothing that is known fits it
  bool has_late_ = false;   // what has stayed may have to leave
  bool all_leave_ = false;  // what waits for others does so no longer
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_PLANNED_SCHEDULE_H_
