// The moves of a plan that are due by a use of its step, each told once for its copy, its drop and
// its fetch.
//
//   for (uint32_t i : due.TakeDrops(now)) ... plan.moves[i] ...  // since the last call
//
// Thread safety: none.
// Ownership: the known step is the caller's, and lives as long as anything but RestartFetches is
// called.

#ifndef PINION_ENGINE_PLAN_DUE_MOVES_H_
#define PINION_ENGINE_PLAN_DUE_MOVES_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "pinion/engine/plan/known_step.h"
#include "pinion/engine/plan/step_plan.h"

namespace pinion {

class DueMoves {
 public:
  DueMoves() = default;  // of no plan: only RestartFetches may be called
  explicit DueMoves(const KnownStep& known) : known_(&known) {}

  // Places in the plan's moves: of those whose copies wait, what leaves at use `now` or before.
  absl::Span<const uint32_t> TakeCopies(size_t now) {
    return Take(known_->late_copies(), &StepMove::copy_at, now, next_copy_);
  }
  // What leaves later. It is told again once it is due: by then it may have been saved.
  absl::Span<const uint32_t> CopiesToCome() const {
    return absl::MakeConstSpan(known_->late_copies()).subspan(next_copy_);
  }
  absl::Span<const uint32_t> TakeDrops(size_t now) {
    return Take(known_->drops(), &StepMove::drop_at, now, next_drop_);
  }
  // The next one that is to be fetched; null: none is yet. It is told again until PassFetch.
  const StepMove* NextFetch(size_t now) const {
    const std::vector<StepMove>& moves = known_->plan().moves;
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
    while (next < order.size() && known_->plan().moves[order[next]].*at <= now) ++next;
    return absl::MakeConstSpan(order).subspan(first, next - first);
  }

  const KnownStep* known_ = nullptr;
  size_t next_copy_ = 0;   // in known_->late_copies()
  size_t next_drop_ = 0;   // in known_->drops()
  size_t next_fetch_ = 0;  // in the plan's moves
};

}  // namespace pinion

#endif  // PINION_ENGINE_PLAN_DUE_MOVES_H_
