#include "pinion/engine/planner/idle_intervals.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "pinion/engine/planner/liveness.h"

namespace pinion {

std::vector<Gap> GapsOf(const StepRecord& step) {
  const std::vector<ObjectLife> lives = LivesOf(step);
  const std::vector<size_t> operator_ends = OperatorEnds(step);
  std::vector<Gap> gaps;
  for (size_t index = 0; index < lives.size(); ++index) {
    const StepObject& object = step.objects[index];
    const ObjectLife& life = lives[index];
    // What dropping does not free is among the other bytes.
    if (!object.frees) continue;
    const auto size_bytes = static_cast<int64_t>(object.size_bytes);
    // By the program, and by the operators of the uses so far.
    size_t in_use_until = std::max<size_t>(life.made, object.held_until);
    for (const size_t use : life.uses) {
      if (in_use_until < use && use != life.uses.front() && use > object.saved_until) {
        gaps.push_back({.object = static_cast<uint32_t>(index),
                        .first = in_use_until + 1,
                        .last = use,
                        .read_at = static_cast<uint32_t>(use),
                        .size_bytes = size_bytes,
                        .computed_again = object.recompute_us.has_value()});
      }
      in_use_until = std::max(in_use_until, operator_ends[use] + 1);
    }
    const size_t last = LastStretchOf(object, life, operator_ends);
    if (in_use_until < last) {
      gaps.push_back({.object = static_cast<uint32_t>(index),
                      .first = in_use_until + 1,
                      .last = last,
                      .size_bytes = size_bytes,
                      .computed_again = object.recompute_us.has_value()});
    }
  }
  std::sort(gaps.begin(), gaps.end(), [](const Gap& a, const Gap& b) {
    return std::pair(a.first, a.object) < std::pair(b.first, b.object);
  });
  return gaps;
}

std::vector<StepMove> MovesOf(const StepRecord& step, absl::Span<const Gap> gaps) {
  std::vector<const Gap*> away;
  std::vector<size_t> first_away(step.objects.size(), SIZE_MAX);
  for (const Gap& gap : gaps) {
    if (gap.away_from == Gap::kStays) continue;
    away.push_back(&gap);
    first_away[gap.object] = std::min(first_away[gap.object], gap.away_from);
  }
  // Whoever fetches goes on from one copy in to the next.
  std::sort(away.begin(), away.end(), [](const Gap* a, const Gap* b) {
    return std::tuple(a->computed_again, a->read_at, a->object) <
           std::tuple(b->computed_again, b->read_at, b->object);
  });
  std::vector<StepMove> moves;
  for (const Gap* gap : away) {
    const bool comes_back = gap->read_at != StepMove::kNever;
    const bool needs_no_copy = gap->computed_again || gap->away_from != first_away[gap->object];
    moves.push_back(
        {.object = gap->object,
         .drop_at = static_cast<uint32_t>(gap->away_from - 1),
         .fetch_at = comes_back ? static_cast<uint32_t>(gap->away_until) : StepMove::kNever,
         .read_at = gap->read_at,
         .copies_out = !needs_no_copy});
  }
  return moves;
}

}  // namespace pinion
