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
  std::vector<size_t> until;  // the stretch in which the operator of that use ends
};

std::vector<Uses> UsesOf(const StepRecord& step) {
  std::vector<Uses> uses(step.objects.size());
  for (size_t use = 0; use < step.uses.size(); ++use) {
    size_t end = use;
    while (!step.operators.empty() && end + 1 < step.uses.size() &&
           step.operators[end + 1] == step.operators[use]) {
      ++end;
    }
    uses[step.uses[use]].at.push_back(use);
    uses[step.uses[use]].until.push_back(end + 1);
  }
  return uses;
}

// In which the object is there, if it does not leave.
size_t LastStretch(const StepRecord& step, size_t object, const Uses& uses) {
  const size_t needed_until = step.objects[object].needed_until;
  if (needed_until > 0) return std::max(needed_until, uses.until.back());
  return uses.at.size() > 1 ? uses.until.back() : step.stretches.size() - 1;
}

bool IsAway(const StepMove& move, size_t stretch) {
  return stretch > move.drop_at && (move.fetch_at == StepMove::kNever || stretch <= move.fetch_at);
}

// Every move that one gap of an object allows.
struct GapMoves {
  std::vector<StepMove> moves;
};

std::vector<GapMoves> AllGaps(const StepRecord& step) {
  std::vector<GapMoves> gaps;
  const std::vector<Uses> all = UsesOf(step);
  for (uint32_t object = 0; object < all.size(); ++object) {
    if (!step.objects[object].frees) continue;
    const Uses& uses = all[object];
    const bool computed_again = step.objects[object].recompute_us.has_value();
    for (size_t i = 0; i < uses.at.size(); ++i) {
      GapMoves gap;
      const bool last = i + 1 == uses.at.size();
      // Until it is saved once more the program has it.
      if (!last && uses.at[i + 1] <= step.objects[object].saved_until) continue;
      const size_t end = last ? LastStretch(step, object, uses) : uses.at[i + 1];
      const size_t in_use_until = std::max<size_t>(uses.until[i], step.objects[object].held_until);
      for (size_t drop = in_use_until; drop < end && drop < step.uses.size(); ++drop) {
        if (last) {
          gap.moves.push_back({.object = object,
                               .drop_at = static_cast<uint32_t>(drop),
                               .fetch_at = StepMove::kNever,
                               .read_at = StepMove::kNever});
          continue;
        }
        for (size_t fetch = computed_again ? end : drop + 1; fetch <= end; ++fetch) {
          gap.moves.push_back({.object = object,
                               .drop_at = static_cast<uint32_t>(drop),
                               .fetch_at = static_cast<uint32_t>(fetch),
                               .read_at = static_cast<uint32_t>(end)});
        }
      }
      if (!gap.moves.empty()) gaps.push_back(std::move(gap));
    }
  }
  return gaps;
}

void ForAllPlans(const std::vector<GapMoves>& gaps, std::vector<StepMove>& chosen, size_t from,
                 absl::FunctionRef<void(const std::vector<StepMove>&)> visit) {
  if (from == gaps.size()) return visit(chosen);
  ForAllPlans(gaps, chosen, from + 1, visit);
  for (const StepMove& move : gaps[from].moves) {
    chosen.push_back(move);
    ForAllPlans(gaps, chosen, from + 1, visit);
    chosen.pop_back();
  }
}

// In the order of reading, and with one copy out for each object that moves.
std::vector<StepMove> InOrder(const StepRecord& step, std::vector<StepMove> moves) {
  std::stable_sort(moves.begin(), moves.end(),
                   [](const StepMove& a, const StepMove& b) { return a.read_at < b.read_at; });
  std::vector<uint32_t> out;
  for (StepMove& move : moves) {
    move.copies_out = !step.objects[move.object].recompute_us.has_value() &&
                      std::find(out.begin(), out.end(), move.object) == out.end();
    out.push_back(move.object);
  }
  return moves;
}

}  // namespace

LinkCalibration SmallLink() { return RoundLink(/*duplex_gb_per_s=*/0.7, /*fixed_us=*/0.5); }

uint64_t CountedPeak(const StepRecord& step, const std::vector<StepMove>& moves) {
  const std::vector<Uses> uses = UsesOf(step);
  uint64_t peak = 0;
  for (size_t stretch = 0; stretch < step.stretches.size(); ++stretch) {
    uint64_t bytes = step.stretches[stretch].peak_other_bytes();
    for (size_t object = 0; object < step.objects.size(); ++object) {
      if (!step.objects[object].frees || stretch < uses[object].at.front() ||
          stretch > LastStretch(step, object, uses[object])) {
        continue;
      }
      if (std::none_of(moves.begin(), moves.end(), [&](const StepMove& move) {
            return move.object == object && IsAway(move, stretch);
          })) {
        bytes += step.objects[object].size_bytes;
      }
    }
    peak = std::max(peak, bytes);
  }
  return peak;
}

BestPlan BestOfEveryPlan(const StepRecord& step, uint64_t memory_bytes) {
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
StepRecord RandomChain(std::mt19937& random, uint32_t objects, bool equal_sizes) {
  StepRecord step;
  const auto below = [&random](uint64_t end) { return random() % end; };
  const double compute_us = static_cast<double>(1 + below(12));
  for (uint32_t i = 0; i < objects; ++i) {
    step.objects.push_back({.size_bytes = 1000 * (equal_sizes ? 4 : 1 + below(8))});
    step.uses.push_back(i);
  }
  for (uint32_t i = objects; i-- > 0;) step.uses.push_back(i);
  for (size_t i = 0; i <= step.uses.size(); ++i) {
    step.stretches.push_back({.compute_us = compute_us, .other_bytes = 1000 * below(5)});
  }
  return step;
}

// Objects are read in any order, once, twice or never. Some free nothing, some are held by the
// program, some computed again.
StepRecord RandomOrder(std::mt19937& random) {
  StepRecord step;
  const auto below = [&random](uint64_t end) { return random() % end; };
  uint32_t objects = 0;
  uint32_t operators = 0;
  while (step.uses.size() < 6) {
    const bool makes = objects == 0 || (objects < 3 && below(2) == 0);
    step.uses.push_back(makes ? objects : static_cast<uint32_t>(below(objects)));
    if (makes) {
      ++objects;
      step.objects.push_back({.size_bytes = 1000 * (1 + below(8)), .frees = below(5) > 0});
    }
    operators += below(3) > 0 ? 1 : 0;
    step.operators.push_back(operators);
  }
  for (StepObject& object : step.objects) {
    if (below(3) == 0) object.needed_until = static_cast<uint32_t>(1 + below(step.uses.size()));
    if (below(3) == 0) object.held_until = static_cast<uint32_t>(1 + below(step.uses.size()));
    if (below(5) == 0) object.recompute_us = static_cast<double>(below(4));
  }
  for (size_t i = 0; i <= step.uses.size(); ++i) {
    step.stretches.push_back(
        {.compute_us = static_cast<double>(below(10)), .other_bytes = 1000 * below(5)});
  }
  return step;
}

}  // namespace pinion::testing
