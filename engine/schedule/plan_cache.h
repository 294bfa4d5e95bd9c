// Cache of planned steps, ordered by how likely they come next: first the step that followed the
// last one before, then by recency.
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

  // Inserts a plan, and replaces that of an equal step.
  void Learn(std::shared_ptr<const CachedPlan> cached);
  // Returns the plan of an equal step; null without one.
  std::shared_ptr<const CachedPlan> FindLike(const StepTrace& step) const;
  void Forget(const CachedPlan& cached);

  // Whether the step that begins next adds to gradients. Find and Likeliest return plans of that
  // kind. If no cached step adds to gradients, plans that create gradients serve, since they take
  // more memory.
  void set_begins_with_gradients(bool begins) { begins_with_gradients_ = begins; }
  bool begins_with_gradients() const { return begins_with_gradients_; }
  bool IsOfKind(const CachedPlan& cached) const {
    return cached.step().begins_with_gradients == begins_with_gradients_;
  }
  bool MayBe(const CachedPlan& cached) const;
  // A step begins. The step that followed the last one before moves to the front.
  void OnBegin();
  // A step has ended, which followed `ran`; null: which followed none.
  void OnEnd(const CachedPlan* ran);

  // Returns the first plan that fits and moves it to the front; null without one.
  std::shared_ptr<const CachedPlan> Find(absl::FunctionRef<bool(const CachedPlan&)> fits);

  const std::list<std::shared_ptr<const CachedPlan>>& all() const { return all_; }
  // Returns the most recent plan that keeps to the target; null without one.
  std::shared_ptr<const CachedPlan> Likeliest() const;
  // False if another cached step begins alike: it could not be told apart before its first segment.
  bool MayRecompute(const StepTrace& step) const;
  bool AnyWantsRecomputeTrial() const;

 private:
  // Forgets which step followed which.
  void ForgetOrder();

  std::list<std::shared_ptr<const CachedPlan>> all_;
  bool begins_with_gradients_ = false;  // of the step that runs, or begins next
  const CachedPlan* last_ = nullptr;    // the last step that has ended; null if it had no plan
  absl::flat_hash_map<const CachedPlan*, const CachedPlan*> after_;  // the step that followed each
};

// Decides which steps to record, by how many were recognised in a row.
//
//   if (backoff.WantsRecord(cache)) ...   // record the step that begins
//   backoff.OnEnd(/*is_unknown=*/false);  // it has ended, and was recognised
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
    // The longer no step was recognised, the more steps pass between two records. A program whose
    // steps are never alike has PlanCache::kMax steps recorded while their number doubles.
    const uint64_t every = std::bit_floor((unknown_steps_ / PlanCache::kMax) | 1);
    return unknown_steps_ % every == 0;
  }
  // The next steps are worth a record: kKnownInARow of them, one less if one has begun without.
  void RecordAgain() { known_steps_ = 0; }
  void OnEnd(bool is_unknown) {
    known_steps_ = is_unknown ? 0 : std::min(known_steps_ + 1, kKnownInARowForRecompute);
    unknown_steps_ = is_unknown ? unknown_steps_ + 1 : 0;
  }

 private:
  int known_steps_ = 0;         // recognised ones in a row
  uint64_t unknown_steps_ = 0;  // unrecognised ones in a row
};

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_PLAN_CACHE_H_
