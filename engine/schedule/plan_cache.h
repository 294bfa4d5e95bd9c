// The steps that are planned, in the order in which they are likely to come: what came after the
// last one the time before, then what ran last.
//
// Thread safety: none.

#ifndef PINION_ENGINE_SCHEDULE_PLAN_CACHE_H_
#define PINION_ENGINE_SCHEDULE_PLAN_CACHE_H_

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/engine/schedule/cached_plan.h"

namespace pinion {

class PlanCache {
 public:
  static constexpr size_t kMax = 32;

  // Instead of what was known of a step that saves and reads the same.
  void Learn(std::shared_ptr<const CachedPlan> cached);
  // What is known of a step that saves and reads the same; null without one.
  std::shared_ptr<const CachedPlan> FindLike(const StepTrace& step) const;
  void Forget(const CachedPlan& cached);

  // The step that begins next has gradients to add to, or none. Find and Likeliest look among known
  // ones that do. Where none is known to add to gradients, those that make them are looked at: they
  // take more.
  void set_begins_with_gradients(bool begins) { begins_with_gradients_ = begins; }
  bool begins_with_gradients() const { return begins_with_gradients_; }
  bool IsOfKind(const CachedPlan& cached) const {
    return cached.step().begins_with_gradients == begins_with_gradients_;
  }
  bool MayBe(const CachedPlan& cached) const;
  // A step begins: the one that came after the last step the time before is looked at first.
  void OnBegin();
  // A step has ended, which went on as `ran`; null: as none of them.
  void OnEnd(const CachedPlan* ran);

  // The first one that fits, which comes first from now on; null without one.
  std::shared_ptr<const CachedPlan> Find(absl::FunctionRef<bool(const CachedPlan&)> fits);

  const std::list<std::shared_ptr<const CachedPlan>>& all() const { return all_; }
  // Of those whose plan keeps to the target, the one that ran last; null without one.
  std::shared_ptr<const CachedPlan> Likeliest() const;
  // No other one begins like that step: which of them runs would be known too late for a mix.
  bool MayRecompute(const StepTrace& step) const;
  bool AnyWantsRecomputeTrial() const;

 private:
  // Who is gone comes after nobody.
  void ForgetOrder();

  std::list<std::shared_ptr<const CachedPlan>> all_;
  bool begins_with_gradients_ = false;  // the step that runs, or begins next
  const CachedPlan* last_ = nullptr;    // that has ended; null if it was not known
  absl::flat_hash_map<const CachedPlan*, const CachedPlan*> after_;  // what came after each
};

// Which of the steps that come are worth recording, by how many were known in a row.
//
//   if (pace.WantsRecord(known)) ...   // record the step that begins
//   pace.OnEnd(/*is_unknown=*/false);  // it has ended, and went on as a known one
//
// Thread safety: none.
class RecordingBackoff {
 public:
  static constexpr int kKnownInARow = 3;
  static constexpr int kKnownInARowForRecompute = 16;

  bool WantsRecord(const PlanCache& cached) const {
    if (known_steps_ >= kKnownInARow) {
      return known_steps_ < kKnownInARowForRecompute && cached.AnyWantsRecomputeTrial();
    }
    // The longer no step has been known, the more are let pass before one is recorded: a program
    // whose steps are never alike has PlanCache::kMax of them recorded while their number doubles.
    const uint64_t every = std::bit_floor((unknown_steps_ / PlanCache::kMax) | 1);
    return unknown_steps_ % every == 0;
  }
  // The next two steps are worth it, whatever was known.
  void RecordAgain() { known_steps_ = std::min(known_steps_, kKnownInARow - 2); }
  void OnEnd(bool is_unknown) {
    known_steps_ = is_unknown ? 0 : std::min(known_steps_ + 1, kKnownInARowForRecompute);
    unknown_steps_ = is_unknown ? unknown_steps_ + 1 : 0;
  }

 private:
  int known_steps_ = 0;         // since the last one that was not known
  uint64_t unknown_steps_ = 0;  // since the last one that was known
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_PLAN_CACHE_H_
