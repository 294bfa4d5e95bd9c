// Decides which segments of the running step are recomputed: those of the plan that it follows, or
// those that are tried for the first time.
//
//   trials.OnEarlySegment(next, is_recorded, cache);      // a step begins with a segment
//   trials.OnBegin(signature);                            // a step begins to save
//   trials.Follow(cached);                                // or trials.Try(cached)
//   std::optional<uint32_t> ordinal = trials.OnSegment(); // empty: it is recomputed
//   ... the step ends ...
//   // Before the next step begins:
//   const RecomputeTrials::SegmentLog log = trials.TakeSegmentLog();
//   RecomputeTrials::Note(log, trace);                    // into the trace of that step
//   trials.Learn(log, cached, cache);                     // its plan
//
// The benefit of recomputation is measured, not assumed. A step that has run as planned runs once
// with recomputation, is recorded and planned. The faster of the two plans stays in the cache.
//
// Exception: if several cached steps begin alike and differ later, none of them recomputes: it
// would be known too late which one runs. A step that begins with a segment is taken for the most
// likely one. After a wrong guess, segments at the begin of steps are always kept.
//
// Thread safety: none.

#ifndef PINION_ENGINE_SCHEDULE_RECOMPUTE_TRIALS_H_
#define PINION_ENGINE_SCHEDULE_RECOMPUTE_TRIALS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/engine/schedule/plan_cache.h"

namespace pinion {

class RecomputeTrials {
 public:
  // Trials before recomputation is discarded because the step it was made for did not recur.
  static constexpr int kMaxTries = 3;

  // What a step did with its segments.
  struct SegmentLog {
    std::shared_ptr<const CachedPlan> tried =
        nullptr;                           // whose recomputation was tried; null: no trial
    std::vector<bool> is_recomputed = {};  // by ordinal; inner segments of recomputed ones too
    // The parent of a recomputed segment, by its ordinal.
    std::map<uint32_t, uint32_t> outers = {};
    uint32_t early = 0;       // segments that began before the first save
    bool early_stay = false;  // early segments are always kept
  };

  // As OnSegment, before the first save identifies the step. The segment is treated as in `next`,
  // the most likely step; null keeps it. If the step `is_recorded`, it may try the recomputation of
  // `next`.
  std::optional<uint32_t> OnEarlySegment(std::shared_ptr<const CachedPlan> next, bool is_recorded,
                                         const PlanCache& cache);
  // The step has begun with segments, and saved nothing yet.
  bool has_early() const { return has_early_; }
  // The step has ended without saves.
  void ForgetEarly() { has_early_ = false; }
  // The step begins to save, an object with that signature.
  void OnBegin(uint64_t signature);
  // The step follows `cached`; null: no plan, and keeps all segments from now on. Returns the plan
  // that it followed before, if the step recomputed segments that it should have kept. That plan is
  // to be discarded; steps that begin like it will not recompute.
  std::shared_ptr<const CachedPlan> Follow(std::shared_ptr<const CachedPlan> cached);
  // Whether a step that begins like this one may try its recomputation.
  bool MayTry(const CachedPlan& cached, const PlanCache& cache) const;
  // It does.
  void Try(std::shared_ptr<const CachedPlan> cached);
  // Whether the running or last step is a trial.
  bool IsTrying() const { return log_.tried != nullptr; }
  // A segment begins. Returns its ordinal if it is kept. Inner segments of a recomputed one do not
  // begin, but have ordinals.
  std::optional<uint32_t> OnSegment();
  // Whether the plan recomputes exactly the segments that this step has recomputed so far.
  bool Fits(const CachedPlan& cached) const;

  // The log of the last step.
  SegmentLog TakeSegmentLog() { return std::exchange(log_, {}); }
  // Marks recomputed segments in the trace, and early ones that are always kept.
  static void Note(const SegmentLog& log, StepTrace& step);
  // Whether to search for segments to recompute: the step has run as planned before, and had no
  // trial.
  bool MayRecompute(const SegmentLog& log, const StepTrace& step, const PlanCache& cache) const;
  // Inserts the plan of a recorded step. After a trial, only the faster of the two plans stays.
  void Learn(const SegmentLog& log, std::shared_ptr<const CachedPlan> cached, PlanCache& cache);

 private:
  // No other step that begins like this one needs other segments.
  bool IsAlone(const StepTrace& step, const PlanCache& cache) const;
  // The plan whose segments are recomputed, or tried; may be null.
  const CachedPlan* Known() const;

  std::shared_ptr<const CachedPlan> followed_;
  SegmentLog log_;
  bool has_early_ = false;
  bool early_stay_ = false;  // a guess was wrong
  uint64_t signature_ = 0;
  absl::flat_hash_set<uint64_t> never_recomputed_;  // signatures of steps that keep all segments
  int tries_ = 0;                                   // trials in a row that were other steps
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_RECOMPUTE_TRIALS_H_
