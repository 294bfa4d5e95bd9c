// Which segments of the step that runs are computed again: those of the known step that it follows,
// or those of a mix that is tried, so that it can be recorded.
//
//   choice.OnEarlySegment(next, is_recorded, known);      // a step begins with a segment
//   choice.OnBegin(signature);                            // a step begins to save
//   choice.Follow(known);                                 // or choice.Try(known)
//   std::optional<uint32_t> ordinal = choice.OnSegment(); // nothing: it is computed again
//   ... the step ends ...
//   const RecomputeTrials::SegmentLog log = choice.TakeSegmentLog();      // before the next one
//   begins RecomputeTrials::Note(log, record);                     // into the record of that step
//   choice.Learn(log, known_step, known_steps);           // and what is planned of it
//
// What a mix is worth is found out, not guessed: a step that has run as planned is recorded with it
// once and planned, and the plan is compared with the one without. The longer of the two is
// forgotten. Steps that begin alike, with gradients or without, and then compute other segments are
// not mixed: which of them runs is known too late. A step that begins with a segment is taken for
// the one that is likely to come; where it once was not, segments that steps begin with are kept
// from then on.
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
#include "pinion/engine/schedule/cached_plan.h"
#include "pinion/engine/schedule/plan_cache.h"

namespace pinion {

class RecomputeTrials {
 public:
  // Of a mix whose trials were other steps than it was made for.
  static constexpr int kMaxTries = 3;

  // What a step has done with its segments.
  struct SegmentLog {
    std::shared_ptr<const CachedPlan> tried = nullptr;  // whose mix it was; null: it tried none
    std::vector<bool> is_recomputed = {};  // by ordinal, those inside of such a one as well
    // By ordinal of such a one: the segment that it is inside of.
    std::map<uint32_t, uint32_t> outers = {};
    uint32_t early = 0;       // that began before anything was saved
    bool early_stay = false;  // such ones are not to be computed again
  };

  // As OnSegment, where the step has saved nothing yet by which it is known. What is done with the
  // segment is what `next`, the step that is likely to come, does with it (null: it is kept), or
  // what its mix does, if the step `is_recorded` and may try that.
  std::optional<uint32_t> OnEarlySegment(std::shared_ptr<const CachedPlan> next, bool is_recorded,
                                         const PlanCache& cache);
  // The step has begun with segments, and saved nothing yet.
  bool has_early() const { return has_early_; }
  // The step has ended and saved nothing.
  void ForgetEarly() { has_early_ = false; }
  // By the signature of what it saves first.
  void OnBegin(uint64_t signature);
  // The step goes on as this one; null: as none, and what begins from now on is kept. Returns the
  // one that it went on as before if that has computed segments again which another step should
  // have kept: it is to be forgotten, and no step that begins like it will be mixed.
  std::shared_ptr<const CachedPlan> Follow(std::shared_ptr<const CachedPlan> cached);
  // Whether a step that begins like this one may be run with its mix.
  bool MayTry(const CachedPlan& cached, const PlanCache& cache) const;
  // It is.
  void Try(std::shared_ptr<const CachedPlan> cached);
  // The step that runs, or ran last, tries a mix.
  bool IsTrying() const { return log_.tried != nullptr; }
  // The next segment begins. Its ordinal if it is kept. Those inside of one that is computed again
  // do not begin, and keep the ordinals that they would have.
  std::optional<uint32_t> OnSegment();
  // The known step has computed again what this one has so far, and no more.
  bool Fits(const CachedPlan& cached) const;

  // Of the last step.
  SegmentLog TakeSegmentLog() { return std::exchange(log_, {}); }
  // Marks the segments that were computed again, and those that are not to be.
  static void Note(const SegmentLog& log, StepTrace& step);
  // Whether it is worth looking for a mix of that step: it has run as planned before, and no mix of
  // it was tried.
  bool MayRecompute(const SegmentLog& log, const StepTrace& step, const PlanCache& cache) const;
  // Adds what was planned of a step's record to those that are known. Where the step tried a mix,
  // the shorter one of the two stays.
  void Learn(const SegmentLog& log, std::shared_ptr<const CachedPlan> cached, PlanCache& cache);

 private:
  // No step that begins like this one should keep what it does not.
  bool IsAlone(const StepTrace& step, const PlanCache& cache) const;
  // Whose segments are computed again, or tried; null: nobody's.
  const CachedPlan* Known() const;

  std::shared_ptr<const CachedPlan> followed_;
  SegmentLog log_;
  bool has_early_ = false;
  bool early_stay_ = false;  // from now on: it was not known what comes
  uint64_t signature_ = 0;
  absl::flat_hash_set<uint64_t> never_recomputed_;  // signatures of steps that are not to be mixed
  int tries_ = 0;                                   // in a row that were other steps
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_RECOMPUTE_TRIALS_H_
