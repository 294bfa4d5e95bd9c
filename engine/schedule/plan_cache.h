// Plans of recorded steps: one step with its plan (CachedPlan), a cursor over its moves
// (PlanCursor), all that may recur (PlanCache), and which steps to record (RecordingBackoff).

#ifndef PINION_ENGINE_SCHEDULE_PLAN_CACHE_H_
#define PINION_ENGINE_SCHEDULE_PLAN_CACHE_H_

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/liveness.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/engine/schedule/offload_schedule.h"
#include "pinion/engine/schedule/reservation.h"

namespace pinion {

// A recorded step with its plan, indexed for a later step that does the same.
//
//   CachedPlan cached(step, plan);
//   std::optional<uint32_t> object = cached.Find(signature, /*before=*/0);
//
// A step is recognised by what it saves and reads. An object is identified by its signature and its
// rank among equal signatures, a read by its place in the order. A branch that is left out does not
// disturb the rest. A step that creates gradients and one that adds to them are different steps
// (StepTrace::begins_with_gradients).
//
// Thread safety: immutable.
class CachedPlan {
 public:
  // `shortfall` says why the plan takes more than the target, if it does. `recompute_set`: indices
  // of segments whose recomputation would likely shorten the step. `memory_bytes`: what the step
  // may take.
  CachedPlan(StepTrace step, StepPlan plan, absl::Status shortfall = absl::OkStatus(),
             std::vector<uint32_t> recompute_set = {}, uint64_t memory_bytes = UINT64_MAX);
  // The same plan, whose recomputation was tried and is not wanted any longer.
  std::shared_ptr<const CachedPlan> WithRecomputeTried() const;
  // The same plan, of a step that was seen to grow by that much (GrowthBytes).
  std::shared_ptr<const CachedPlan> WithGrowths(absl::Span<const StepGrowth> growths) const;
  std::vector<StepGrowth> SeenGrowths() const;
  // The same plan, after a search for segments to recompute.
  std::shared_ptr<const CachedPlan> WithRecomputeSearched() const;

  const StepTrace& step() const { return step_; }
  const StepPlan& plan() const { return plan_; }
  const absl::Status& shortfall() const { return shortfall_; }
  uint64_t memory_bytes() const { return memory_bytes_; }
  const std::vector<uint32_t>& recompute_set() const { return recompute_set_; }
  bool recompute_was_tried() const { return recompute_was_tried_; }
  // Another record of the step would help: to search for segments to recompute, or to try them.
  bool WantsRecomputeTrial() const {
    const bool is_seen = recompute_was_searched_ && recompute_set_.empty();
    return !step_.segments.empty() && shortfall_.ok() && !recompute_was_tried_ && !is_seen;
  }
  // Whether the step was recorded, and is planned, with segment `ordinal` recomputed.
  bool Recomputes(size_t ordinal) const {
    return ordinal < step_.segments.size() && step_.segments[ordinal].is_recomputed;
  }
  // Whether the step saves this object first.
  bool BeginsWith(uint64_t signature) const {
    return step_.objects[step_.accesses.front()].signature == signature;
  }
  // What was allocated when the first tensor was saved.
  uint64_t begin_bytes() const;
  // How many bytes `device_bytes` exceed that.
  uint64_t ExcessBytes(uint64_t device_bytes) const;
  // Whether the plan keeps to its memory if `device_bytes` are allocated at that moment. One that
  // falls short does if they are that much less.
  bool FitsWith(uint64_t device_bytes) const;
  // Whether a step that begins with `device_bytes` can run by the plan.
  bool CanRunWith(uint64_t device_bytes) const { return shortfall_.ok() && FitsWith(device_bytes); }
  // For people: whether the step adds to gradients, and why the plan is not run.
  std::string note() const;

  // The object with that signature, of which `before` were saved already.
  std::optional<uint32_t> Find(uint64_t signature, size_t before) const;
  // Index of the object's `n`-th access, from 0; of the last one if there are fewer.
  size_t AccessIndex(uint32_t object, size_t n) const;
  // Index of the object's next read after access `now`. Empty if this must be another step: one
  // that reads the object once more, in another order, or with another kind of backward.
  std::optional<size_t> NextRead(uint32_t object, size_t now, AccessKind how) const;
  // Whether the object is no longer needed at that access.
  bool IsOverBy(uint32_t object, size_t access) const {
    const uint32_t needed_until = step_.objects[object].needed_until;
    return needed_until > 0 && needed_until <= access;
  }
  // Index of the object's next access after `now`.
  std::optional<size_t> NextAccess(uint32_t object, size_t now) const;
  // Whether evicting the object after access `now` frees memory: neither its operator nor the
  // program references it then.
  bool FreesBehind(uint32_t object, size_t now) const;
  // Whether there is a next access, and the object is resident until then.
  bool IsResidentUntilNextAccess(uint32_t object, size_t now) const {
    const std::optional<size_t> next = NextAccess(object, now);
    return next.has_value() && !comes_back_[*next];
  }
  // Objects by the interval in which they are no longer needed, where that is known.
  const std::vector<uint32_t>& overs() const { return overs_; }
  // Whether the other step saves and reads the same.
  bool IsLike(const StepTrace& other) const;
  // How many accesses both steps begin with alike.
  size_t AccessesAlike(const CachedPlan& other) const;
  // How often the object is saved.
  size_t Saves(uint32_t object) const { return lives_[object].saves; }
  bool Moves(uint32_t object) const { return batch_key_[object] != 0; }
  // OffloadSchedule::BatchKey. Objects that are evicted and fetched at the same accesses, and read
  // by the same operators, share a key. 0: the object stays.
  uint64_t BatchKey(uint32_t object) const { return batch_key_[object]; }
  // The same for large objects, which share no parcel: those with the same first eviction form a
  // batch.
  uint64_t LargeBatchKey(uint32_t object) const {
    return batch_key_[object] == 0 ? 0 : uint64_t{1} << 62 | first_eviction_[object];
  }
  // A batch key that is unique to `object`.
  static uint64_t UniqueBatchKey(uint32_t object) { return uint64_t{1} << 63 | object; }
  // Indices of moves, by eviction.
  const std::vector<uint32_t>& evictions() const { return evictions_; }
  // Indices of moves with deferred copies (StepMove::copy_at), by copy.
  const std::vector<uint32_t>& deferred_copies() const { return deferred_copies_; }
  // Whether an object saved by access `now` is not copied out yet: it does not move, or its copy is
  // deferred.
  bool Stays(uint32_t object, size_t now) const { return !Moves(object) || now < copy_at_[object]; }
  // The most that memory grows between access `access` and the next one.
  uint64_t GrowthBytes(size_t access) const { return growth_bytes_[access]; }
  // The most up to that access, while the step only saves; then 0.
  uint64_t SaveGrowthBytes(size_t access) const {
    return access < save_growth_bytes_.size() ? save_growth_bytes_[access] : 0;
  }
  // The most of all accesses.
  uint64_t MostGrowthBytes() const { return most_growth_bytes_; }

 private:
  // Sets the maxima of growth_bytes_.
  void SumUpGrowths();

  StepTrace step_;
  StepPlan plan_;
  absl::Status shortfall_;
  std::vector<uint32_t> recompute_set_;
  uint64_t memory_bytes_;
  bool recompute_was_tried_ = false;
  bool recompute_was_searched_ = false;
  absl::flat_hash_map<uint64_t, std::vector<uint32_t>> by_signature_;
  std::vector<ObjectLiveness> lives_;  // by object
  std::vector<size_t> operator_ends_;
  std::vector<uint32_t> overs_;
  std::vector<uint64_t> batch_key_;  // by object
  std::vector<uint32_t> evictions_;
  std::vector<uint32_t> deferred_copies_;
  std::vector<uint32_t> copy_at_;                         // by object
  std::vector<uint32_t> first_eviction_;                  // by object, of those that move
  absl::flat_hash_map<uint32_t, uint64_t> seen_growths_;  // by access
  std::vector<uint64_t> growth_bytes_;                    // by access
  std::vector<uint64_t> save_growth_bytes_;               // by access, up to the first read
  uint64_t most_growth_bytes_ = 0;
  std::vector<bool> comes_back_;  // by access: whether a move fetches the object for it
};

// Cursor over the moves of a plan: returns each move once for its copy, its eviction and its fetch.
//
//   for (uint32_t i : cursor.TakeEvictionsDue(now)) ... plan.moves[i] ...  // since the last call
//
// Thread safety: none.
// Ownership: the cached plan is the caller's. It may die before the cursor if only RestartFetches
// is called.
class PlanCursor {
 public:
  PlanCursor() = default;  // of no plan: only RestartFetches may be called
  explicit PlanCursor(const CachedPlan& cached) : cached_(&cached) {}

  // Indices of moves whose deferred copy is due at access `now` or before.
  absl::Span<const uint32_t> TakeCopies(size_t now) {
    return Take(cached_->deferred_copies(), &StepMove::copy_at, now, next_copy_);
  }
  // Deferred copies that are not due. They are returned again when they are due: the object may be
  // saved by then.
  absl::Span<const uint32_t> CopiesToCome() const {
    return absl::MakeConstSpan(cached_->deferred_copies()).subspan(next_copy_);
  }
  absl::Span<const uint32_t> TakeEvictionsDue(size_t now) {
    return Take(cached_->evictions(), &StepMove::evict_at, now, next_eviction_);
  }
  // The next move to fetch, or null if none is due. Returned again until PassFetch.
  const StepMove* NextFetch(size_t now) const {
    const std::vector<StepMove>& moves = cached_->plan().moves;
    const bool is_due = next_fetch_ < moves.size() && moves[next_fetch_].fetch_at <= now;
    return is_due ? &moves[next_fetch_] : nullptr;
  }
  void PassFetch() { ++next_fetch_; }
  // Returns all fetches again.
  void RestartFetches() { next_fetch_ = 0; }

 private:
  absl::Span<const uint32_t> Take(const std::vector<uint32_t>& order, uint32_t StepMove::*at,
                                  size_t now, size_t& next) const {
    const size_t first = next;
    while (next < order.size() && cached_->plan().moves[order[next]].*at <= now) ++next;
    return absl::MakeConstSpan(order).subspan(first, next - first);
  }

  const CachedPlan* cached_ = nullptr;
  size_t next_copy_ = 0;      // index in cached_->deferred_copies()
  size_t next_eviction_ = 0;  // index in cached_->evictions()
  size_t next_fetch_ = 0;     // index in the plan's moves
};

// Plans a recorded step. With `memory_bytes`, the plan keeps to them; with `may_recompute`, it also
// searches for segments to recompute (recompute_plan.h). If the step does not fit, the plan takes
// the least memory that is possible, and CachedPlan::shortfall() says why. Without `memory_bytes`,
// the plan is PlanStepWithoutTarget's. Weights get `reservation` of `memory_bytes`. If the step can
// do without, `margin_bytes` more stay free.
absl::StatusOr<std::shared_ptr<const CachedPlan>> MakeCachedPlan(
    StepTrace step, std::optional<uint64_t> memory_bytes, const LinkCalibration& link,
    bool may_recompute, const Reservation& reservation, uint64_t margin_bytes);

// The steps, ordered by how likely they come next: first the step that followed the last one
// before, then by recency.
//
// Thread safety: none.
class PlanCache {
 public:
  static constexpr size_t kMax = 32;

  // Inserts a plan, and replaces that of an equal step, whose seen growths last. A step that falls
  // short because it began with too much leaves the plan to those that begin with less.
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
