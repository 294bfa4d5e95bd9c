#include "pinion/bench/offload/offline_plan.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/planner/liveness.h"
#include "pinion/engine/planner/plan_step.h"
#include "pinion/engine/planner/residency_planner.h"
#include "pinion/engine/planner/step_simulation.h"

namespace pinion {
namespace {

// The intervals of a gap in which an object is offloaded; empty if it stays resident.
struct Away {
  size_t from = 0;
  size_t until = 0;
};
using Choice = std::vector<std::optional<Away>>;  // by gap

class Search {
 public:
  Search(const StepTrace& step, uint64_t memory_bytes, const LinkCalibration& link, uint64_t seed)
      : step_(step),
        limit_bytes_(static_cast<int64_t>(memory_bytes)),
        link_(link),
        random_(seed),
        all_here_(DeviceBytes(step, {})),
        idle_intervals_(IdleIntervalsOf(step)) {}

  // Starts from `best`, or from all objects offloaded.
  absl::StatusOr<StepPlan> Run(StepPlan best, bool from_best, int tries) {
    Choice current = ChoiceOf(best);
    double current_us = from_best ? best.step_us : std::numeric_limits<double>::infinity();
    for (int i = 0; i < tries && !idle_intervals_.empty(); ++i) {
      const std::optional<Choice> other =
          i == 0 ? Derived(std::vector<bool>(idle_intervals_.size(), true)) : Neighbour(current);
      if (!other.has_value()) continue;
      std::vector<StepMove> moves = Moves(*other);
      PINION_ASSIGN_OR_RETURN(StepTimes times, SimulateStep(step_, moves, link_));
      std::vector<StepMove> ordered = InEvictionOrder(step_, moves, times);
      PINION_ASSIGN_OR_RETURN(StepTimes in_order, SimulateStep(step_, ordered, link_));
      if (in_order.step_us < times.step_us) {
        times = std::move(in_order);
        moves = std::move(ordered);
      }
      const double worse_us = times.step_us - current_us;
      if (worse_us > 0 && !Accepts(worse_us, best.step_us, 1 - static_cast<double>(i) / tries)) {
        continue;
      }
      current = *other;
      current_us = times.step_us;
      if (current_us >= best.step_us) continue;
      best.moves = std::move(moves);
      best.step_us = current_us;
    }
    best.peak_bytes = static_cast<uint64_t>(UsedBy(ChoiceOf(best)).MostIn(0, end()));
    return best;
  }

 private:
  size_t end() const { return step_.intervals.size() - 1; }
  size_t Below(size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random_); }

  // Simulated annealing: accepts longer plans, less often as `temperature` falls.
  bool Accepts(double worse_us, double best_us, double temperature) {
    constexpr double kHottest = 0.01;  // of the step's time
    const double chance = std::exp(-worse_us / (kHottest * best_us * temperature));
    return std::uniform_real_distribution<double>(0, 1)(random_) < chance;
  }

  Choice ChoiceOf(const StepPlan& plan) const {
    Choice choice(idle_intervals_.size());
    for (const StepMove& move : plan.moves) {
      for (size_t i = 0; i < idle_intervals_.size(); ++i) {
        if (idle_intervals_[i].object != move.object || idle_intervals_[i].read_at != move.read_at)
          continue;
        choice[i] = {move.evict_at + size_t{1},
                     std::min<size_t>(move.fetch_at, idle_intervals_[i].last)};
      }
    }
    return choice;
  }

  RangeMaxTree UsedBy(const Choice& choice) const {
    RangeMaxTree used = all_here_;
    for (size_t i = 0; i < idle_intervals_.size(); ++i) {
      if (choice[i].has_value())
        used.Add(choice[i]->from, choice[i]->until, -idle_intervals_[i].size_bytes);
    }
    return used;
  }

  // Derives offload and prefetch times. Objects stay as long as there is room, the last copied out
  // the longest. They are prefetched as soon as there is room, in the order of reads.
  std::optional<Choice> Derived(const std::vector<bool>& leaves) const {
    RangeMaxTree used = all_here_;
    std::vector<size_t> away;
    for (size_t i = 0; i < idle_intervals_.size(); ++i) {
      if (!leaves[i]) continue;
      away.push_back(i);
      used.Add(idle_intervals_[i].first, idle_intervals_[i].last, -idle_intervals_[i].size_bytes);
    }
    if (used.MostIn(0, end()) > limit_bytes_) return std::nullopt;
    Choice choice(idle_intervals_.size());
    std::stable_sort(away.begin(), away.end(), [&](size_t a, size_t b) {
      return idle_intervals_[a].object > idle_intervals_[b].object;
    });
    std::erase_if(away, [&](size_t i) {
      const size_t from = StaysUntil(idle_intervals_[i], used);
      used.Add(idle_intervals_[i].first, from - 1, idle_intervals_[i].size_bytes);
      if (from <= idle_intervals_[i].last) choice[i] = {from, idle_intervals_[i].last};
      return from > idle_intervals_[i].last;
    });
    std::sort(away.begin(), away.end(), [&](size_t a, size_t b) {
      return idle_intervals_[a].read_at < idle_intervals_[b].read_at;
    });
    size_t earliest = 0;
    for (const size_t i : away) {
      const IdleInterval& idle = idle_intervals_[i];
      if (idle.read_at == StepMove::kNever || idle.is_recast) continue;
      const std::optional<size_t> full = used.LastAbove(idle.last, limit_bytes_ - idle.size_bytes);
      earliest = choice[i]->until = std::max({choice[i]->from, earliest, full.value_or(0)});
      used.Add(earliest + 1, idle.last, idle.size_bytes);
    }
    return choice;
  }

  // The first interval of the gap that has no room for the object; the one behind it if all have.
  size_t StaysUntil(const IdleInterval& idle, const RangeMaxTree& used) const {
    size_t fits_before = idle.first;
    size_t below = idle.last + 1;
    while (fits_before < below) {
      const size_t middle = fits_before + (below - fits_before) / 2;
      if (used.MostIn(idle.first, middle) + idle.size_bytes <= limit_bytes_) {
        fits_before = middle + 1;
      } else {
        below = middle;
      }
    }
    return fits_before;
  }

  std::optional<Choice> Neighbour(const Choice& current) {
    return Below(2) == 0 ? OthersLeave(current) : SomeAreShifted(current);
  }

  // Offloads one object more, one less, or one in another's place.
  std::optional<Choice> OthersLeave(const Choice& current) {
    std::vector<bool> leaves;
    for (const std::optional<Away>& away : current) leaves.push_back(away.has_value());
    for (size_t changes = 1 + Below(3); changes > 0; --changes) {
      const size_t i = Below(idle_intervals_.size());
      leaves[i] = !leaves[i];
    }
    return Derived(leaves);
  }

  // Moves the offload or prefetch of one to three objects.
  std::optional<Choice> SomeAreShifted(Choice choice) {
    for (size_t shifts = 1 + Below(3); shifts > 0; --shifts) {
      const size_t i = Below(idle_intervals_.size());
      const IdleInterval& idle = idle_intervals_[i];
      const bool comes_back = idle.read_at != StepMove::kNever && !idle.is_recast;
      const size_t from = idle.first + Below(idle.last - idle.first + 1);
      const size_t until = comes_back ? from + Below(idle.last - from + 1) : idle.last;
      const bool keeps_from = choice[i].has_value() && choice[i]->from <= until && Below(2) == 0;
      choice[i] = {keeps_from ? choice[i]->from : from, until};
    }
    if (UsedBy(choice).MostIn(0, end()) > limit_bytes_) return std::nullopt;
    return choice;
  }

  std::vector<StepMove> Moves(const Choice& choice) const {
    std::vector<IdleInterval> idle_intervals = idle_intervals_;
    for (size_t i = 0; i < idle_intervals.size(); ++i) {
      if (!choice[i].has_value()) continue;
      idle_intervals[i].offloaded_from = choice[i]->from;
      idle_intervals[i].offloaded_until = choice[i]->until;
    }
    return MovesOf(step_, idle_intervals);
  }

  const StepTrace& step_;
  const int64_t limit_bytes_;
  const LinkCalibration& link_;
  std::mt19937_64 random_;
  RangeMaxTree all_here_;  // by interval, if nothing is away
  const std::vector<IdleInterval> idle_intervals_;
};

}  // namespace

absl::StatusOr<StepPlan> SearchPlan(const StepTrace& step, uint64_t memory_bytes,
                                    const LinkCalibration& link, const PlanSearch& search) {
  PINION_ASSIGN_OR_RETURN(StepPlan best, PlanStep(step, memory_bytes, link));
  for (const bool from_planned : {true, false}) {
    Search search_from(step, memory_bytes, link, search.seed + (from_planned ? 0 : 1));
    PINION_ASSIGN_OR_RETURN(StepPlan found, search_from.Run(best, from_planned, search.tries));
    if (found.step_us < best.step_us) best = std::move(found);
  }
  return best;
}

}  // namespace pinion
