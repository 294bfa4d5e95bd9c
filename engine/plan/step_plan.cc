#include "pinion/engine/plan/step_plan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <random>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/plan/idle_gaps.h"
#include "pinion/engine/plan/room.h"
#include "pinion/engine/plan/step_gaps.h"
#include "pinion/engine/plan/step_memory.h"
#include "pinion/engine/plan/step_simulation.h"

namespace pinion {
namespace {

class Planner {
 public:
  explicit Planner(const StepRecord& step)
      : step_(step), used_(DeviceBytes(step, {})), gaps_(GapsOf(step)), by_last_(gaps_.size()) {
    std::iota(by_last_.begin(), by_last_.end(), size_t{0});
    std::stable_sort(by_last_.begin(), by_last_.end(),
                     [this](size_t a, size_t b) { return gaps_[a].last < gaps_[b].last; });
  }

  size_t end() const { return step_.stretches.size() - 1; }
  uint64_t MostBytes() const {
    return static_cast<uint64_t>(*std::max_element(used_.begin(), used_.end()));
  }

  // With everything away that is idle.
  uint64_t LeastBytes() const {
    std::vector<int64_t> begins(end() + 2);  // of gaps less those that end, by stretch
    for (const Gap& gap : gaps_) {
      begins[gap.first] += gap.size_bytes;
      begins[gap.last + 1] -= gap.size_bytes;
    }
    int64_t least_bytes = 0;
    int64_t away_bytes = 0;
    for (size_t stretch = 0; stretch <= end(); ++stretch) {
      away_bytes += begins[stretch];
      least_bytes = std::max(least_bytes, used_[stretch] - away_bytes);
    }
    return static_cast<uint64_t>(least_bytes);
  }

  // Belady's rule: whose next use is farthest away goes first, behind what costs no copy.
  std::vector<uint32_t> RanksByNextUse() const {
    std::vector<uint32_t> ranks;
    for (const Gap& gap : gaps_) ranks.push_back(gap.computed_again ? UINT32_MAX : gap.read_at);
    return ranks;
  }

  // The moves that keep within `limit_bytes`, which is at least LeastBytes().
  std::vector<StepMove> MovesWithin(int64_t limit_bytes, Choice choice,
                                    const std::vector<uint32_t>& ranks) const {
    std::vector<Gap> gaps = gaps_;
    SendAway(limit_bytes, choice, ranks, gaps);
    std::vector<Gap*> away;
    for (Gap& gap : gaps) {
      if (gap.away_from != Gap::kStays) away.push_back(&gap);
    }
    Room used = WithAway(away);
    StayLong(limit_bytes, away, used);
    FetchEarly(limit_bytes, away, used);
    LeaveAltogether(gaps);
    return MovesOf(step_, gaps);
  }

 private:
  void SendAway(int64_t limit_bytes, Choice choice, const std::vector<uint32_t>& ranks,
                std::vector<Gap>& gaps) const {
    IdleGaps idle(gaps, ranks, choice);
    size_t begun = 0;
    size_t over = 0;  // in by_last_
    int64_t away_bytes = 0;
    for (size_t stretch = 0; stretch <= end(); ++stretch) {
      for (; begun < gaps.size() && gaps[begun].first == stretch; ++begun) idle.Add(begun);
      for (; over < gaps.size() && gaps[by_last_[over]].last < stretch; ++over) {
        const Gap& gap = gaps[by_last_[over]];
        idle.Remove(by_last_[over]);
        if (gap.away_from != Gap::kStays) away_bytes -= gap.size_bytes;
      }
      while (used_[stretch] - away_bytes > limit_bytes) {
        const size_t chosen = idle.Choose(used_[stretch] - away_bytes - limit_bytes);
        idle.Remove(chosen);
        gaps[chosen].away_from = stretch;
        gaps[chosen].away_until = gaps[chosen].last;
        away_bytes += gaps[chosen].size_bytes;
      }
    }
  }

  // What is there if all of these are away throughout their gaps.
  Room WithAway(const std::vector<Gap*>& away) const {
    std::vector<int64_t> changes(end() + 2);
    for (const Gap* gap : away) {
      changes[gap->first] -= gap->size_bytes;
      changes[gap->last + 1] += gap->size_bytes;
    }
    std::vector<int64_t> used = used_;
    int64_t change = 0;
    for (size_t stretch = 0; stretch <= end(); ++stretch) {
      change += changes[stretch];
      used[stretch] += change;
    }
    return Room(used);
  }

  // Copies out are done in the order in which objects were made, so the last ones stay the longest:
  // for good, if there is room.
  static void StayLong(int64_t limit_bytes, std::vector<Gap*>& away, Room& used) {
    std::sort(away.begin(), away.end(), [](const Gap* a, const Gap* b) {
      return std::tuple(a->computed_again, b->object, b->first) <
             std::tuple(b->computed_again, a->object, a->first);
    });
    std::erase_if(away, [&](Gap* gap) {
      const size_t full =
          used.FirstAbove(gap->first, limit_bytes - gap->size_bytes).value_or(gap->last + 1);
      const bool stays = full > gap->last;
      if (gap->computed_again && !stays) return false;
      used.Add(gap->first, stays ? gap->last : full - 1, gap->size_bytes);
      gap->away_from = stays ? Gap::kStays : full;
      return stays;
    });
  }

  // In the order of reading: one copy in comes behind the other.
  static void FetchEarly(int64_t limit_bytes, std::vector<Gap*>& away, Room& used) {
    std::sort(away.begin(), away.end(), [](const Gap* a, const Gap* b) {
      return std::tuple(a->read_at, a->object) < std::tuple(b->read_at, b->object);
    });
    size_t earliest = 0;
    for (Gap* gap : away) {
      if (gap->read_at == StepMove::kNever || gap->computed_again) continue;
      const std::optional<size_t> full = used.LastAbove(gap->last, limit_bytes - gap->size_bytes);
      gap->away_until = std::max({gap->away_from, earliest, full.value_or(0)});
      earliest = gap->away_until;
      used.Add(gap->away_until + 1, gap->last, gap->size_bytes);
    }
  }

  // What is computed again is let go of when it is saved, so that each reader computes it.
  void LeaveAltogether(std::vector<Gap>& gaps) const {
    std::vector<bool> leaves(step_.objects.size());
    for (const Gap& gap : gaps) {
      if (gap.computed_again && gap.away_from != Gap::kStays) leaves[gap.object] = true;
    }
    for (Gap& gap : gaps) {
      if (!leaves[gap.object]) continue;
      gap.away_from = gap.first;
      gap.away_until = gap.last;
    }
  }

  const StepRecord& step_;
  const std::vector<int64_t> used_;  // by stretch, if nothing is moved
  const std::vector<Gap> gaps_;
  std::vector<size_t> by_last_;  // gaps in the order in which they end
};

absl::Status CheckPlannable(const StepRecord& step) {
  PINION_RETURN_IF_ERROR(step.Validate());
  for (size_t i = 0; i < step.objects.size(); ++i) {
    if (step.objects[i].origin == StepObject::Origin::kHost) {
      return absl::InvalidArgumentError(
          absl::StrCat("object ", i, " comes from the host: PlanStep plans what a step makes"));
    }
  }
  return absl::OkStatus();
}

// So many plans as can be tried in 10 to 20 ms, beside the first two.
int TriesFor(const StepRecord& step) {
  constexpr size_t kTriedUses = 50'000;
  constexpr size_t kTriesPerUse = 8;  // a short step has few plans
  const size_t uses = step.uses.size();
  const size_t plans = std::min(kTriesPerUse * uses, kTriedUses / (uses + 1));
  return static_cast<int>(plans - std::min<size_t>(plans, 2));
}

// What its copies carry, both ways.
uint64_t CopiedBytes(const StepRecord& step, const std::vector<StepMove>& moves) {
  uint64_t bytes = 0;
  for (const StepMove& move : moves) {
    if (step.objects[move.object].recompute_us.has_value()) continue;
    const int copies = (move.copies_out ? 1 : 0) + (move.fetch_at != StepMove::kNever ? 1 : 0);
    bytes += copies * step.objects[move.object].size_bytes;
  }
  return bytes;
}

// What a plan costs; of two that take the same time the one that copies less is better.
using Cost = std::pair<double, uint64_t>;

constexpr Choice kChoices[] = {Choice::kHighest, Choice::kFitting};

// The best of the plans that are tried: by each of `choices`, and then, as long as it takes more
// than `enough_us`, again and again with one or two more gaps that go first or last, whatever their
// next use.
absl::StatusOr<StepPlan> BestWithin(const StepRecord& step, const Planner& planner,
                                    uint64_t memory_bytes, const StepSimulator& simulator,
                                    double enough_us, absl::Span<const Choice> choices, int tries) {
  StepPlan best;
  Cost best_cost = {std::numeric_limits<double>::infinity(), UINT64_MAX};
  for (const Choice choice : choices) {
    std::mt19937 random;  // of one seed: a step has one plan
    std::vector<uint32_t> chosen = planner.RanksByNextUse();
    Cost chosen_cost = {std::numeric_limits<double>::infinity(), UINT64_MAX};
    for (int i = 0; i <= tries / 2; ++i) {
      std::vector<uint32_t> ranks = chosen;
      for (size_t changes = i == 0 ? 0 : 1 + random() % 2; changes > 0; --changes) {
        ranks[random() % ranks.size()] = random() % 2 == 0 ? 0 : UINT32_MAX;
      }
      StepPlan plan;
      plan.moves = planner.MovesWithin(static_cast<int64_t>(memory_bytes), choice, ranks);
      PINION_ASSIGN_OR_RETURN(const StepTimes times, simulator.Run(plan.moves));
      plan.step_us = times.step_us;
      const Cost cost = {plan.step_us, CopiedBytes(step, plan.moves)};
      if (cost > chosen_cost) continue;
      chosen = std::move(ranks);
      chosen_cost = cost;
      if (cost >= best_cost) continue;
      best = std::move(plan);
      best_cost = cost;
      if (best.step_us <= enough_us || best.moves.empty()) return best;
    }
  }
  return best;
}

// With its peak, which has to keep within `memory_bytes`.
absl::StatusOr<StepPlan> Checked(const StepRecord& step, StepPlan plan, uint64_t memory_bytes) {
  const std::vector<int64_t> bytes = DeviceBytes(step, plan.moves);
  plan.peak_bytes = static_cast<uint64_t>(*std::max_element(bytes.begin(), bytes.end()));
  if (plan.peak_bytes <= memory_bytes) return plan;
  return absl::InternalError(
      absl::StrCat("a plan for ", memory_bytes, " bytes takes ", plan.peak_bytes));
}

}  // namespace

absl::StatusOr<uint64_t> LeastMemoryBytes(const StepRecord& step) {
  PINION_RETURN_IF_ERROR(step.Validate());
  return Planner(step).LeastBytes();
}

absl::StatusOr<StepPlan> PlanStep(const StepRecord& step, uint64_t memory_bytes,
                                  const LinkCalibration& link, PlanEffort effort) {
  PINION_RETURN_IF_ERROR(CheckPlannable(step));
  const Planner planner(step);
  if (const uint64_t least_bytes = planner.LeastBytes(); least_bytes > memory_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the step does not fit into ", memory_bytes, " bytes of device memory (",
                     HumanBytes(memory_bytes), "), whatever leaves: the least is ", least_bytes,
                     " bytes (", HumanBytes(least_bytes), ")"));
  }
  PINION_ASSIGN_OR_RETURN(const StepSimulator simulator, StepSimulator::Create(step, link));
  memory_bytes = std::min(memory_bytes, planner.MostBytes());
  const bool tries = effort == PlanEffort::kTries;
  PINION_ASSIGN_OR_RETURN(StepPlan plan,
                          BestWithin(step, planner, memory_bytes, simulator, step.compute_us(),
                                     {kChoices, tries ? 2u : 1u}, tries ? TriesFor(step) : 0));
  return Checked(step, std::move(plan), memory_bytes);
}

absl::StatusOr<StepPlan> PlanStepWithin(const StepRecord& step, double slowdown,
                                        const LinkCalibration& link) {
  PINION_RETURN_IF_ERROR(CheckPlannable(step));
  const Planner planner(step);
  PINION_ASSIGN_OR_RETURN(const StepSimulator simulator, StepSimulator::Create(step, link));
  const double allowed_us = slowdown * step.compute_us();
  const auto plan_within = [&](uint64_t memory_bytes) {
    return BestWithin(step, planner, memory_bytes, simulator, allowed_us, {kChoices, 1},
                      /*tries=*/0);
  };
  uint64_t enough_bytes = planner.MostBytes();
  uint64_t too_little_bytes = planner.LeastBytes();
  PINION_ASSIGN_OR_RETURN(StepPlan best, plan_within(enough_bytes));
  PINION_ASSIGN_OR_RETURN(StepPlan tried, plan_within(too_little_bytes));
  if (tried.step_us <= allowed_us) return Checked(step, std::move(tried), too_little_bytes);
  // To a hundredth of what there is to gain.
  const uint64_t exact_bytes = (enough_bytes - too_little_bytes) / 100;
  while (enough_bytes - too_little_bytes > exact_bytes + 1) {
    const uint64_t middle_bytes = too_little_bytes + (enough_bytes - too_little_bytes) / 2;
    PINION_ASSIGN_OR_RETURN(tried, plan_within(middle_bytes));
    if (tried.step_us <= allowed_us) {
      enough_bytes = middle_bytes;
      best = std::move(tried);
    } else {
      too_little_bytes = middle_bytes;
    }
  }
  return Checked(step, std::move(best), enough_bytes);
}

}  // namespace pinion
