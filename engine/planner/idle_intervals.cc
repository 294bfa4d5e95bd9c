#include "pinion/engine/planner/idle_intervals.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "pinion/engine/planner/liveness.h"

namespace pinion {

std::vector<IdleInterval> IdleIntervalsOf(const StepTrace& step) {
  const std::vector<ObjectLiveness> lives = LivenessOf(step);
  const std::vector<size_t> operator_ends = OperatorEnds(step);
  std::vector<IdleInterval> idle_intervals;
  for (size_t index = 0; index < lives.size(); ++index) {
    const StepObject& object = step.objects[index];
    const ObjectLiveness& life = lives[index];
    // Memory that evicting does not free is among the other bytes.
    if (!object.frees) continue;
    const auto size_bytes = static_cast<int64_t>(object.size_bytes);
    // By the program, or by the operators of the accesses so far.
    size_t in_use_until = std::max<size_t>(life.made, object.held_until);
    for (const size_t access : life.accesses) {
      if (in_use_until < access && access != life.accesses.front() && access > object.saved_until) {
        idle_intervals.push_back({.object = static_cast<uint32_t>(index),
                                  .first = in_use_until + 1,
                                  .last = access,
                                  .read_at = static_cast<uint32_t>(access),
                                  .size_bytes = size_bytes,
                                  .is_recast = object.recast_us.has_value()});
      }
      in_use_until = std::max(in_use_until, operator_ends[access] + 1);
    }
    const size_t last = LastIntervalOf(object, life, operator_ends);
    if (in_use_until < last) {
      idle_intervals.push_back({.object = static_cast<uint32_t>(index),
                                .first = in_use_until + 1,
                                .last = last,
                                .size_bytes = size_bytes,
                                .is_recast = object.recast_us.has_value()});
    }
  }
  std::sort(idle_intervals.begin(), idle_intervals.end(),
            [](const IdleInterval& a, const IdleInterval& b) {
              return std::pair(a.first, a.object) < std::pair(b.first, b.object);
            });
  return idle_intervals;
}

bool IsPrefetchedBefore(const IdleInterval& a, const IdleInterval& b) {
  return std::tuple(a.is_recast, a.read_at, a.object) <
         std::tuple(b.is_recast, b.read_at, b.object);
}

std::vector<StepMove> MovesOf(const StepTrace& step,
                              absl::Span<const IdleInterval> idle_intervals) {
  std::vector<const IdleInterval*> offloaded;
  std::vector<size_t> first_offloaded(step.objects.size(), SIZE_MAX);
  for (const IdleInterval& idle : idle_intervals) {
    if (idle.offloaded_from == IdleInterval::kStays) continue;
    offloaded.push_back(&idle);
    first_offloaded[idle.object] = std::min(first_offloaded[idle.object], idle.offloaded_from);
  }
  std::sort(offloaded.begin(), offloaded.end(), [](const IdleInterval* a, const IdleInterval* b) {
    return IsPrefetchedBefore(*a, *b);
  });
  std::vector<StepMove> moves;
  for (const IdleInterval* idle : offloaded) {
    const bool is_fetched = idle->read_at != StepMove::kNever;
    const bool needs_no_copy =
        idle->is_recast || idle->offloaded_from != first_offloaded[idle->object];
    moves.push_back(
        {.object = idle->object,
         .evict_at = static_cast<uint32_t>(idle->offloaded_from - 1),
         .fetch_at = is_fetched ? static_cast<uint32_t>(idle->offloaded_until) : StepMove::kNever,
         .read_at = idle->read_at,
         .copies_out = !needs_no_copy});
  }
  return moves;
}

}  // namespace pinion
