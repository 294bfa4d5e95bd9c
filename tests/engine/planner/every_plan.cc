#include "pinion/tests/engine/planner/every_plan.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "absl/functional/function_ref.h"
#include "pinion/engine/planner/step_simulation.h"
#include "pinion/tests/engine/planner/small_steps.h"

namespace pinion::testing {
namespace {

// The uses of one object, and when its operator is done with each.
struct Uses {
  std::vector<size_t> at;
  std::vector<size_t> until;  // the interval in which the operator of that use ends
};

std::vector<Uses> UsesOf(const StepTrace& step) {
  std::vector<Uses> accesses(step.objects.size());
  for (size_t access = 0; access < step.accesses.size(); ++access) {
    size_t end = access;
    while (!step.operators.empty() && end + 1 < step.accesses.size() &&
           step.operators[end + 1] == step.operators[access]) {
      ++end;
    }
    accesses[step.accesses[access]].at.push_back(access);
    accesses[step.accesses[access]].until.push_back(end + 1);
  }
  return accesses;
}

// Returns the last interval in which a resident object is alive.
size_t LastInterval(const StepTrace& step, size_t object, const Uses& accesses) {
  const size_t needed_until = step.objects[object].needed_until;
  if (needed_until > 0) return std::max(needed_until, accesses.until.back());
  return accesses.at.size() > 1 ? accesses.until.back() : step.intervals.size() - 1;
}

bool IsOffloaded(const StepMove& move, size_t interval) {
  return interval > move.evict_at &&
         (move.fetch_at == StepMove::kNever || interval <= move.fetch_at);
}

// Every move that one gap of an object allows.
using GapMoves = std::vector<StepMove>;

std::vector<GapMoves> AllGaps(const StepTrace& step) {
  std::vector<GapMoves> idle_intervals;
  const std::vector<Uses> all = UsesOf(step);
  for (uint32_t object = 0; object < all.size(); ++object) {
    if (!step.objects[object].frees) continue;
    const Uses& accesses = all[object];
    const bool is_recomputed = step.objects[object].recast_us.has_value();
    for (size_t i = 0; i < accesses.at.size(); ++i) {
      GapMoves idle;
      const bool last = i + 1 == accesses.at.size();
      // Until it is saved once more the program has it.
      if (!last && accesses.at[i + 1] <= step.objects[object].saved_until) continue;
      const size_t end = last ? LastInterval(step, object, accesses) : accesses.at[i + 1];
      const size_t in_use_until =
          std::max<size_t>(accesses.until[i], step.objects[object].held_until);
      for (size_t evict = in_use_until; evict < end && evict < step.accesses.size(); ++evict) {
        if (last) {
          idle.push_back({.object = object,
                          .evict_at = static_cast<uint32_t>(evict),
                          .fetch_at = StepMove::kNever,
                          .read_at = StepMove::kNever});
          continue;
        }
        for (size_t fetch = is_recomputed ? end : evict + 1; fetch <= end; ++fetch) {
          idle.push_back({.object = object,
                          .evict_at = static_cast<uint32_t>(evict),
                          .fetch_at = static_cast<uint32_t>(fetch),
                          .read_at = static_cast<uint32_t>(end)});
        }
      }
      if (!idle.empty()) idle_intervals.push_back(std::move(idle));
    }
  }
  return idle_intervals;
}

void ForAllPlans(const std::vector<GapMoves>& idle_intervals, std::vector<StepMove>& chosen,
                 size_t from, absl::FunctionRef<void(const std::vector<StepMove>&)> visit) {
  if (from == idle_intervals.size()) return visit(chosen);
  ForAllPlans(idle_intervals, chosen, from + 1, visit);
  for (const StepMove& move : idle_intervals[from]) {
    chosen.push_back(move);
    ForAllPlans(idle_intervals, chosen, from + 1, visit);
    chosen.pop_back();
  }
}

// In the order of reading, and with one copy out for each object that moves.
std::vector<StepMove> InOrder(const StepTrace& step, std::vector<StepMove> moves) {
  std::stable_sort(moves.begin(), moves.end(),
                   [](const StepMove& a, const StepMove& b) { return a.read_at < b.read_at; });
  std::vector<uint32_t> out;
  for (StepMove& move : moves) {
    move.copies_out = !step.objects[move.object].recast_us.has_value() &&
                      std::find(out.begin(), out.end(), move.object) == out.end();
    out.push_back(move.object);
  }
  return moves;
}

}  // namespace

LinkCalibration SmallLink() { return RoundLink(/*duplex_gb_per_s=*/0.7, /*fixed_us=*/0.5); }

uint64_t CountedPeak(const StepTrace& step, const std::vector<StepMove>& moves) {
  const std::vector<Uses> accesses = UsesOf(step);
  uint64_t peak = 0;
  for (size_t interval = 0; interval < step.intervals.size(); ++interval) {
    uint64_t bytes = step.intervals[interval].peak_other_bytes();
    for (size_t object = 0; object < step.objects.size(); ++object) {
      if (!step.objects[object].frees || interval < accesses[object].at.front() ||
          interval > LastInterval(step, object, accesses[object])) {
        continue;
      }
      if (std::none_of(moves.begin(), moves.end(), [&](const StepMove& move) {
            return move.object == object && IsOffloaded(move, interval);
          })) {
        bytes += step.objects[object].size_bytes;
      }
    }
    peak = std::max(peak, bytes);
  }
  return peak;
}

BestPlan BestOfEveryPlan(const StepTrace& step, uint64_t memory_bytes) {
  BestPlan best;
  std::vector<StepMove> chosen;
  ForAllPlans(AllGaps(step), chosen, 0, [&](const std::vector<StepMove>& plan) {
    const uint64_t peak_bytes = CountedPeak(step, plan);
    best.least_bytes = std::min(best.least_bytes, peak_bytes);
    if (peak_bytes > memory_bytes) return;
    best.step_us = std::min(best.step_us,
                            SimulateStep(step, InOrder(step, plan), SmallLink()).value().step_us);
  });
  return best;
}

// One forward of `objects` and its backward.
StepTrace RandomChain(std::mt19937& random, uint32_t objects, bool equal_sizes) {
  StepTrace step;
  const auto below = [&random](uint64_t end) { return random() % end; };
  const double compute_us = static_cast<double>(1 + below(12));
  for (uint32_t i = 0; i < objects; ++i) {
    step.objects.push_back({.size_bytes = 1000 * (equal_sizes ? 4 : 1 + below(8))});
    step.accesses.push_back(i);
  }
  for (uint32_t i = objects; i-- > 0;) step.accesses.push_back(i);
  for (size_t i = 0; i <= step.accesses.size(); ++i) {
    step.intervals.push_back({.compute_us = compute_us, .other_bytes = 1000 * below(5)});
  }
  return step;
}

// Objects are read in any order, once, twice or never. Some free nothing, some are held by the
// program, some computed again.
StepTrace RandomOrder(std::mt19937& random) {
  StepTrace step;
  const auto below = [&random](uint64_t end) { return random() % end; };
  uint32_t objects = 0;
  uint32_t operators = 0;
  while (step.accesses.size() < 6) {
    const bool makes = objects == 0 || (objects < 3 && below(2) == 0);
    step.accesses.push_back(makes ? objects : static_cast<uint32_t>(below(objects)));
    if (makes) {
      ++objects;
      step.objects.push_back({.size_bytes = 1000 * (1 + below(8)), .frees = below(5) > 0});
    }
    operators += below(3) > 0 ? 1 : 0;
    step.operators.push_back(operators);
  }
  for (StepObject& object : step.objects) {
    if (below(3) == 0) object.needed_until = static_cast<uint32_t>(1 + below(step.accesses.size()));
    if (below(3) == 0) object.held_until = static_cast<uint32_t>(1 + below(step.accesses.size()));
    if (below(5) == 0) object.recast_us = static_cast<double>(below(4));
  }
  for (size_t i = 0; i <= step.accesses.size(); ++i) {
    step.intervals.push_back(
        {.compute_us = static_cast<double>(below(10)), .other_bytes = 1000 * below(5)});
  }
  return step;
}

}  // namespace pinion::testing
