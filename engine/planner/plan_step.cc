#include "pinion/engine/planner/plan_step.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/planner/liveness.h"
#include "pinion/engine/planner/residency_planner.h"
#include "pinion/engine/planner/step_simulation.h"

namespace pinion {
namespace {

// How many plans can be tried in 10 to 20 ms, beside the first two.
int TriesFor(const StepTrace& step) {
  constexpr size_t kTriedAccesses = 50'000;
  constexpr size_t kTriesPerAccess = 8;  // a short step has few plans
  const size_t accesses = step.accesses.size();
  const size_t plans = std::min(kTriesPerAccess * accesses, kTriedAccesses / (accesses + 1));
  return static_cast<int>(plans - std::min<size_t>(plans, 2));
}

// Bytes that the copies transfer, in both directions.
uint64_t CopiedBytes(const StepTrace& step, const std::vector<StepMove>& moves) {
  uint64_t bytes = 0;
  for (const StepMove& move : moves) {
    if (step.objects[move.object].recast_us.has_value()) continue;
    const int copies = (move.copies_out ? 1 : 0) + (move.fetch_at != StepMove::kNever ? 1 : 0);
    bytes += copies * step.objects[move.object].size_bytes;
  }
  return bytes;
}

// Of two plans that take the same time, the one that copies less is better.
using Cost = std::pair<double, uint64_t>;

constexpr EvictionRule kEvictionRules[] = {EvictionRule::kHighest, EvictionRule::kFitting};

// One or two idle intervals, drawn at random, rank first or last.
void Change(std::vector<uint32_t>& ranks, std::mt19937& random) {
  for (size_t changes = 1 + random() % 2; changes > 0; --changes) {
    ranks[random() % ranks.size()] = random() % 2 == 0 ? 0 : UINT32_MAX;
  }
}

// Searches for the shortest plan, starting from Belady's rule under each of `rules`. While the plan
// takes more than `enough_us`, it evicts the blockers of a plan that was better, or changes ranks
// at random, and keeps what is no worse. At last it reorders the copies out, if that shortens the
// step.
StepPlan BestWithin(const StepTrace& step, const ResidencyPlanner& planner, uint64_t memory_bytes,
                    const StepSimulator& simulator, double enough_us,
                    absl::Span<const EvictionRule> rules, int tries) {
  StepPlan best;
  StepTimes best_times;
  Cost best_cost = {std::numeric_limits<double>::infinity(), UINT64_MAX};
  for (const EvictionRule rule : rules) {
    std::mt19937 random;  // a fixed seed: a step always gets the same plan
    PlanPreferences chosen = planner.ByNextAccess();
    Cost chosen_cost = {std::numeric_limits<double>::infinity(), UINT64_MAX};
    std::vector<Blocker> blockers;  // to evict next
    for (int i = 0; i <= tries / 2; ++i) {
      PlanPreferences preferences = chosen;
      preferences.EvictEarlier(blockers);
      if (blockers.empty() && i > 0) Change(preferences.ranks, random);
      PlannedMoves planned =
          planner.MovesWithin(static_cast<int64_t>(memory_bytes), rule, preferences);
      StepTimes times = simulator.Run(planned.moves);
      const Cost cost = {times.step_us, CopiedBytes(step, planned.moves)};
      blockers.clear();
      if (cost > chosen_cost) continue;
      if (cost < chosen_cost) blockers = std::move(planned.blockers);
      chosen = std::move(preferences);
      chosen_cost = cost;
      if (cost >= best_cost) continue;
      best.moves = std::move(planned.moves);
      best.step_us = times.step_us;
      best_times = std::move(times);
      best_cost = cost;
      if (best.step_us <= enough_us || best.moves.empty()) return best;
    }
  }
  std::vector<StepMove> ordered = InEvictionOrder(step, best.moves, best_times);
  if (ordered == best.moves) return best;
  const double ordered_us = simulator.Run(ordered).step_us;
  if (ordered_us < best.step_us) {
    best.moves = std::move(ordered);
    best.step_us = ordered_us;
  }
  return best;
}

// Sets the plan's peak, which has to keep within `memory_bytes`.
absl::StatusOr<StepPlan> Checked(const StepTrace& step, StepPlan plan, uint64_t memory_bytes) {
  const std::vector<int64_t> bytes = DeviceBytes(step, plan.moves);
  plan.peak_bytes = static_cast<uint64_t>(*std::max_element(bytes.begin(), bytes.end()));
  if (plan.peak_bytes <= memory_bytes) return plan;
  return absl::InternalError(
      absl::StrCat("a plan for ", memory_bytes, " bytes takes ", plan.peak_bytes));
}

}  // namespace

absl::StatusOr<uint64_t> LeastMemoryBytes(const StepTrace& step) {
  PINION_RETURN_IF_ERROR(step.Validate());
  return ResidencyPlanner(step).LeastBytes();
}

absl::StatusOr<StepPlan> PlanStep(const StepTrace& step, uint64_t memory_bytes,
                                  const LinkCalibration& link, PlanEffort effort) {
  PINION_RETURN_IF_ERROR(step.Validate());
  const ResidencyPlanner planner(step);
  if (const uint64_t least_bytes = planner.LeastBytes(); least_bytes > memory_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the step does not fit into ", memory_bytes, " bytes of device memory (",
                     HumanBytes(memory_bytes), "), whatever leaves: the least is ", least_bytes,
                     " bytes (", HumanBytes(least_bytes), ")"));
  }
  PINION_ASSIGN_OR_RETURN(const StepSimulator simulator, StepSimulator::Create(step, link));
  memory_bytes = std::min(memory_bytes, planner.MostBytes());
  const bool tries = effort == PlanEffort::kTries;
  StepPlan plan = BestWithin(step, planner, memory_bytes, simulator, step.compute_us(),
                             {kEvictionRules, tries ? 2u : 1u}, tries ? TriesFor(step) : 0);
  return Checked(step, std::move(plan), memory_bytes);
}

absl::StatusOr<StepPlan> PlanStepWithoutTarget(const StepTrace& step, const LinkCalibration& link) {
  PINION_RETURN_IF_ERROR(step.Validate());
  const ResidencyPlanner planner(step);
  PINION_ASSIGN_OR_RETURN(const StepSimulator simulator, StepSimulator::Create(step, link));
  const double allowed_us = kMaxSlowdown * step.compute_us();
  const auto plan_within = [&](uint64_t memory_bytes) {
    return BestWithin(step, planner, memory_bytes, simulator, allowed_us, {kEvictionRules, 1},
                      /*tries=*/0);
  };
  uint64_t enough_bytes = planner.MostBytes();
  uint64_t too_little_bytes = planner.LeastBytes();
  StepPlan best = plan_within(enough_bytes);
  StepPlan tried = plan_within(too_little_bytes);
  if (tried.step_us <= allowed_us) return Checked(step, std::move(tried), too_little_bytes);
  // To one percent of the possible gain.
  const uint64_t exact_bytes = (enough_bytes - too_little_bytes) / 100;
  while (enough_bytes - too_little_bytes > exact_bytes + 1) {
    const uint64_t middle_bytes = too_little_bytes + (enough_bytes - too_little_bytes) / 2;
    tried = plan_within(middle_bytes);
    if (tried.step_us <= allowed_us) {
      enough_bytes = middle_bytes;
      best = std::move(tried);
    } else {
      too_little_bytes = middle_bytes;
    }
  }
  best.less_is_slower = true;
  return Checked(step, std::move(best), enough_bytes);
}

}  // namespace pinion
