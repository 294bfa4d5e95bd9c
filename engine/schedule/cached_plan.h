// A step that was recorded, with its plan, as one looks things up in them while a later step runs
// that does the same.
//
//   CachedPlan known(step, plan);
//   std::optional<uint32_t> object = known.Find(signature, /*before=*/0);
//
// A step is known again by what it saves and reads: each object by its signature, and by how many
// of that signature came before; each read by its place in the order. What a branch leaves out does
// not disturb the rest. Beyond that a step which makes gradients is another one than one which adds
// to them (StepTrace::begins_with_gradients).
//
// Thread safety: none needed: it does not change.

#ifndef PINION_ENGINE_SCHEDULE_CACHED_PLAN_H_
#define PINION_ENGINE_SCHEDULE_CACHED_PLAN_H_ #include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/liveness.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/engine/schedule/offload_schedule.h"
#include "pinion/engine/schedule/set_aside.h"

namespace pinion {

class CachedPlan {
 public:
  // `shortfall` tells why the plan takes more than the target, if it does. `mix`: segments of the
  // step, by index, with which it would likely be shorter if they were computed again.
  // `memory_bytes`: what the step may have, where that is known and it can do with it.
  CachedPlan(StepTrace step, StepPlan plan, absl::Status shortfall = absl::OkStatus(),
             std::vector<uint32_t> recompute_set = {}, uint64_t memory_bytes = UINT64_MAX);
  // The same step, whose mix was tried and is no more.
  std::shared_ptr<const CachedPlan> WithRecomputeTried() const;
  // The same step, of which it was seen whether there is a mix.
  std::shared_ptr<const CachedPlan> WithRecomputeSearched() const;

  const StepTrace& step() const { return step_; }
  const StepPlan& plan() const { return plan_; }
  const absl::Status& shortfall() const { return shortfall_; }
  uint64_t memory_bytes() const { return memory_bytes_; }
  const std::vector<uint32_t>& recompute_set() const { return recompute_set_; }
  bool recompute_was_tried() const { return recompute_was_tried_; }
  // A record of it would be of use: to look for a mix, or to try the one that was found.
  bool WantsRecomputeTrial() const {
    const bool is_seen = recompute_was_searched_ && recompute_set_.empty();
    return !step_.segments.empty() && shortfall_.ok() && !recompute_was_tried_ && !is_seen;
  }
  // Whether the step was recorded, and is planned, with its segment `ordinal` computed again.
  bool Recomputes(size_t ordinal) const {
    return ordinal < step_.segments.size() && step_.segments[ordinal].is_recomputed;
  }
  // It saves this first.
  bool BeginsWith(uint64_t signature) const {
    return step_.objects[step_.accesses.front()].signature == signature;
  }
  // How much more `device_bytes` are than were on the device when the first tensor was saved.
  uint64_t ExcessBytes(uint64_t device_bytes) const;
  // The plan keeps to what the step may have also where that much is there then.
  bool FitsWith(uint64_t device_bytes) const {
    return memory_bytes_ == UINT64_MAX ||
           plan_.peak_bytes + ExcessBytes(device_bytes) <= memory_bytes_;
  }
  // For people: that the step adds to gradients, that the plan is not run, and why.
  std::string note() const;

  // Which of its objects the one with that signature is of which `before` were saved already.
  std::optional<uint32_t> Find(uint64_t signature, size_t before) const;
  // The ordinal of the object's `n`-th use, from 0; of the last one if there are fewer.
  size_t AccessIndex(uint32_t object, size_t n) const;
  // The ordinal of the object's next read after use `now`. None: this is another step, which reads
  // it once more, in another order, by a backward that makes a graph where this one's does not, or
  // keeps the graph where this one lets go of it.
  std::optional<size_t> NextRead(uint32_t object, size_t now, AccessKind how) const;
  // Whether nobody needs the object any more when that use comes.
  bool IsOverBy(uint32_t object, size_t access) const {
    const uint32_t needed_until = step_.objects[object].needed_until;
    return needed_until > 0 && needed_until <= access;
  }
  // The ordinal of its next use behind use `now`.
  std::optional<size_t> NextAccess(uint32_t object, size_t now) const;
  // Whether its memory goes when it is dropped behind use `now`: neither that use's operator nor
  // the program has it.
  bool FreesBehind(uint32_t object, size_t now) const;
  // Whether there is one, and it is on the device until then.
  bool IsResidentUntilNextAccess(uint32_t object, size_t now) const {
    const std::optional<size_t> next = NextAccess(object, now);
    return next.has_value() && !comes_back_[*next];
  }
  // Objects in the order in which they are over, where that is known.
  const std::vector<uint32_t>& overs() const { return overs_; }
  // It saves and reads the same.
  bool IsLike(const StepTrace& other) const;
  // How often it is saved.
  size_t Saves(uint32_t object) const;
  bool Moves(uint32_t object) const { return batch_key_[object] != 0; }
  // OffloadSchedule::BatchKey: the same for objects that go and come back at the same uses, and
  // whose readers are the same operators. 0: it stays.
  uint64_t BatchKey(uint32_t object) const { return batch_key_[object]; }
  // The same for large objects, which share no parcel: who goes at the same use leaves together.
  uint64_t LargeBatchKey(uint32_t object) const {
    return batch_key_[object] == 0 ? 0 : uint64_t{1} << 62 | first_eviction_[object];
  }
  // That of an object, by any number, that nobody else shares.
  static uint64_t UniqueBatchKey(uint32_t object) { return uint64_t{1} << 63 | object; }
  // Moves (places in plan().moves) by what happens first.
  const std::vector<uint32_t>& evictions() const { return evictions_; }
  // Those whose copies out wait (StepMove::copy_at), in the order of these copies.
  const std::vector<uint32_t>& deferred_copies() const { return deferred_copies_; }
  // Whether the object is not copied out at use `now` or before, if it was saved by then: it does
  // not move, or its copy waits for others.
  bool Stays(uint32_t object, size_t now) const { return !Moves(object) || now < copy_at_[object]; }
  // How much more than behind use `access` there is at most until the next one.
  uint64_t GrowthBytes(size_t access) const { return growth_bytes_[access]; }
  // The most of any use.
  uint64_t MostGrowthBytes() const { return most_growth_bytes_; }

 private:
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
  std::vector<uint32_t> copy_at_;         // by object
  std::vector<uint32_t> first_eviction_;  // by object, of those that move
  std::vector<uint64_t> growth_bytes_;    // by use
  uint64_t most_growth_bytes_ = 0;
  std::vector<bool> comes_back_;  // by use: for it, the object does
};

// The moves of a plan that are due by a use of its step, each told once for its copy, its drop and
// its fetch.
//
//   for (uint32_t i : due.TakeEvictionsDue(now)) ... plan.moves[i] ...  // since the last call
//
// Thread safety: none.
// Ownership: the known step is the caller's, and lives as long as anything but RestartFetches is
// called.
class PlanCursor {
 public:
  PlanCursor() = default;  // of no plan: only RestartFetches may be called
  explicit PlanCursor(const CachedPlan& cached) : cached_(&cached) {}

  // Places in the plan's moves: of those whose copies wait, what leaves at use `now` or before.
  absl::Span<const uint32_t> TakeCopies(size_t now) {
    return Take(cached_->deferred_copies(), &StepMove::copy_at, now, next_copy_);
  }
  // What leaves later. It is told again once it is due: by then it may have been saved.
  absl::Span<const uint32_t> CopiesToCome() const {
    return absl::MakeConstSpan(cached_->deferred_copies()).subspan(next_copy_);
  }
  absl::Span<const uint32_t> TakeEvictionsDue(size_t now) {
    return Take(cached_->evictions(), &StepMove::evict_at, now, next_drop_);
  }
  // The next one that is to be fetched; null: none is yet. It is told again until PassFetch.
  const StepMove* NextFetch(size_t now) const {
    const std::vector<StepMove>& moves = cached_->plan().moves;
    const bool is_due = next_fetch_ < moves.size() && moves[next_fetch_].fetch_at <= now;
    return is_due ? &moves[next_fetch_] : nullptr;
  }
  void PassFetch() { ++next_fetch_; }
  // All fetches are told once more.
  void RestartFetches() { next_fetch_ = 0; }

 private:
  absl::Span<const uint32_t> Take(const std::vector<uint32_t>& order, uint32_t StepMove::*at,
                                  size_t now, size_t& next) const {
    const size_t first = next;
    while (next < order.size() && cached_->plan().moves[order[next]].*at <= now) ++next;
    return absl::MakeConstSpan(order).subspan(first, next - first);
  }

  const CachedPlan* cached_ = nullptr;
  size_t next_copy_ = 0;   // in cached_->late_copies()
  size_t next_drop_ = 0;   // in cached_->drops()
  size_t next_fetch_ = 0;  // in the plan's moves
};

// Within `memory_bytes`, and if it `mixes`, with the mix of what is kept and computed again that is
// likely the best (recompute_plan.h), if one is better than none. Where the step does not fit, the
// plan of the least memory that can be, and CachedPlan::shortfall() says why. Without
// `memory_bytes`, in the least memory that takes at most `slowdown` times the step's compute, and
// nothing is computed again. Of `memory_bytes`, some are set `aside`; `margin_bytes` more stay free
// where the step can do without.
absl::StatusOr<std::shared_ptr<const CachedPlan>> MakeCachedPlan(
    StepTrace step, std::optional<uint64_t> memory_bytes, double slowdown,
    const LinkCalibration& link, bool may_recompute, const SetAside& aside,
    uint64_t margin_bytes = 0);

}  // namespace pinion

#endif  // PINION_ENGINE_SCHEDULE_CACHED_PLAN_H_
