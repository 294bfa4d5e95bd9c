#include "pinion/engine/plan/step_plan.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/plan/room.h"
#include "pinion/engine/plan/step_lives.h"
#include "pinion/engine/plan/step_simulation.h"

namespace pinion {
namespace {

// Stretches in which an object is idle, so that it can be away.
struct Gap {
  uint32_t object = 0;
  size_t first = 0;
  size_t last = 0;
  uint32_t read_at = StepMove::kNever;
  int64_t size_bytes = 0;

  // What was decided: in which of them it is away. kStays, if in none.
  static constexpr size_t kStays = SIZE_MAX;
  size_t away_from = kStays;
  size_t away_until = 0;
};

// Whom to send away where a stretch needs room.
enum class Choice {
  kFarthest,  // whose next use is farthest away
  kFitting,   // the same, but the smallest that makes enough room if one alone does
};

class Planner {
 public:
  explicit Planner(const StepRecord& step)
      : step_(step), used_(step.stretches.size()), over_(step.objects.size()) {
    for (size_t i = 0; i < step.stretches.size(); ++i) {
      used_.Add(i, i, static_cast<int64_t>(step.stretches[i].peak_other_bytes()));
    }
    FindGaps();
  }

  size_t end() const { return step_.stretches.size() - 1; }
  uint64_t MostBytes() const { return static_cast<uint64_t>(used_.MostIn(0, end())); }

  // With everything away that is idle.
  uint64_t LeastBytes() const {
    Room least = used_;
    for (const Gap& gap : gaps_) least.Add(gap.first, gap.last, -gap.size_bytes);
    return static_cast<uint64_t>(least.MostIn(0, end()));
  }

  uint64_t PeakBytes(const std::vector<StepMove>& moves) const {
    Room used = used_;
    for (const StepMove& move : moves) {
      const size_t until = std::min<size_t>(move.fetch_at, over_[move.object]);
      used.Add(move.drop_at + 1, until,
               -static_cast<int64_t>(step_.objects[move.object].size_bytes));
    }
    return static_cast<uint64_t>(used.MostIn(0, end()));
  }

  // The moves that keep within `limit_bytes`, which is at least LeastBytes().
  std::vector<StepMove> MovesWithin(int64_t limit_bytes, Choice choice) const {
    std::vector<Gap> gaps = gaps_;
    Room used = used_;
    SendAway(limit_bytes, choice, gaps, used);
    std::vector<Gap*> away;
    for (Gap& gap : gaps) {
      if (gap.away_from != Gap::kStays) away.push_back(&gap);
    }
    std::sort(away.begin(), away.end(), [](const Gap* a, const Gap* b) {
      return std::pair(a->read_at, a->object) < std::pair(b->read_at, b->object);
    });
    KeepWhatFits(limit_bytes, away, used);
    FetchEarly(limit_bytes, away, used);
    return MovesOf(away);
  }

 private:
  // Fills `gaps_`, and counts in `used_` what is on the device if nothing is moved.
  void FindGaps() {
    const std::vector<ObjectLife> lives = LivesOf(step_);
    const std::vector<size_t> operator_ends = OperatorEnds(step_);
    for (size_t index = 0; index < lives.size(); ++index) {
      const StepObject& object = step_.objects[index];
      const ObjectLife& life = lives[index];
      // What dropping does not free is among the other bytes.
      if (!object.frees) continue;
      const auto size_bytes = static_cast<int64_t>(object.size_bytes);
      // The stretch in which the operator of the last use so far ends.
      size_t in_use_until = life.made;
      for (const size_t use : life.uses) {
        if (in_use_until < use && use != life.uses.front()) {
          gaps_.push_back({.object = static_cast<uint32_t>(index),
                           .first = in_use_until + 1,
                           .last = use,
                           .read_at = static_cast<uint32_t>(use),
                           .size_bytes = size_bytes});
        }
        in_use_until = std::max(in_use_until, operator_ends[use] + 1);
      }
      const bool to_the_end = !life.is_read && object.needed_until == 0;
      const size_t needed_until = to_the_end ? end() : std::min<size_t>(object.needed_until, end());
      const size_t over = std::max(in_use_until, needed_until);
      if (in_use_until < over) {
        gaps_.push_back({.object = static_cast<uint32_t>(index),
                         .first = in_use_until + 1,
                         .last = over,
                         .size_bytes = size_bytes});
      }
      used_.Add(life.made, over, size_bytes);
      over_[index] = over;
    }
    std::sort(gaps_.begin(), gaps_.end(), [](const Gap& a, const Gap& b) {
      return std::pair(a.first, a.object) < std::pair(b.first, b.object);
    });
  }

  void SendAway(int64_t limit_bytes, Choice choice, std::vector<Gap>& gaps, Room& used) const {
    // On the device and idle, by next use.
    std::set<std::pair<uint32_t, size_t>> idle;
    size_t begun = 0;
    std::vector<std::vector<size_t>> over(end() + 2);  // gaps by the stretch behind them
    for (size_t i = 0; i < gaps.size(); ++i) over[gaps[i].last + 1].push_back(i);
    for (size_t stretch = 0; stretch <= end(); ++stretch) {
      for (; begun < gaps.size() && gaps[begun].first == stretch; ++begun) {
        idle.emplace(gaps[begun].read_at, begun);
      }
      for (const size_t gap : over[stretch]) idle.erase({gaps[gap].read_at, gap});
      int64_t excess_bytes = used.MostIn(stretch, stretch) - limit_bytes;
      while (excess_bytes > 0) {
        auto chosen = std::prev(idle.end());
        if (choice == Choice::kFitting) {
          for (auto it = idle.begin(); it != idle.end(); ++it) {
            const int64_t size_bytes = gaps[it->second].size_bytes;
            if (size_bytes >= excess_bytes && size_bytes <= gaps[chosen->second].size_bytes) {
              chosen = it;
            }
          }
        }
        Gap& gap = gaps[chosen->second];
        idle.erase(chosen);
        gap.away_from = stretch;
        gap.away_until = gap.last;
        used.Add(stretch, gap.last, -gap.size_bytes);
        excess_bytes -= gap.size_bytes;
      }
    }
  }

  // Whoever was sent away first may have made so much room that a later one need not go.
  static void KeepWhatFits(int64_t limit_bytes, std::vector<Gap*>& away, Room& used) {
    std::erase_if(away, [&](const Gap* gap) {
      if (used.MostIn(gap->away_from, gap->last) + gap->size_bytes > limit_bytes) return false;
      used.Add(gap->away_from, gap->last, gap->size_bytes);
      return true;
    });
  }

  // In the order of reading: one copy in comes behind the other.
  static void FetchEarly(int64_t limit_bytes, const std::vector<Gap*>& away, Room& used) {
    size_t earliest = 0;
    for (Gap* gap : away) {
      if (gap->read_at == StepMove::kNever) continue;
      const std::optional<size_t> full = used.LastAbove(gap->last, limit_bytes - gap->size_bytes);
      gap->away_until = std::max({gap->away_from, earliest, full.value_or(0)});
      earliest = gap->away_until;
      used.Add(gap->away_until + 1, gap->last, gap->size_bytes);
    }
  }

  std::vector<StepMove> MovesOf(const std::vector<Gap*>& away) const {
    std::vector<size_t> first_away(step_.objects.size(), SIZE_MAX);
    for (const Gap* gap : away) {
      first_away[gap->object] = std::min(first_away[gap->object], gap->away_from);
    }
    std::vector<StepMove> moves;
    for (const Gap* gap : away) {
      const bool comes_back = gap->read_at != StepMove::kNever;
      moves.push_back(
          {.object = gap->object,
           .drop_at = static_cast<uint32_t>(gap->away_from - 1),
           .fetch_at = comes_back ? static_cast<uint32_t>(gap->away_until) : StepMove::kNever,
           .read_at = gap->read_at,
           .copies_out =
               !step_.objects[gap->object].clean && gap->away_from == first_away[gap->object]});
    }
    return moves;
  }

  const StepRecord& step_;
  Room used_;                 // by stretch, if nothing is moved
  std::vector<size_t> over_;  // by object, the last stretch with it
  std::vector<Gap> gaps_;     // in the order in which they begin
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

// The shortest of the plans that are tried.
absl::StatusOr<StepPlan> BestWithin(const StepRecord& step, const Planner& planner,
                                    uint64_t memory_bytes, const LinkCalibration& link) {
  StepPlan best;
  for (const Choice choice : {Choice::kFarthest, Choice::kFitting}) {
    StepPlan plan;
    plan.moves = planner.MovesWithin(static_cast<int64_t>(memory_bytes), choice);
    PINION_ASSIGN_OR_RETURN(const StepTimes times, SimulateStep(step, plan.moves, link));
    plan.step_us = times.step_us;
    if (choice == Choice::kFarthest || plan.step_us < best.step_us) best = std::move(plan);
  }
  best.peak_bytes = planner.PeakBytes(best.moves);
  if (best.peak_bytes <= memory_bytes) return best;
  return absl::InternalError(
      absl::StrCat("a plan for ", memory_bytes, " bytes takes ", best.peak_bytes));
}

}  // namespace

absl::StatusOr<uint64_t> LeastMemoryBytes(const StepRecord& step) {
  PINION_RETURN_IF_ERROR(step.Validate());
  return Planner(step).LeastBytes();
}

absl::StatusOr<StepPlan> PlanStep(const StepRecord& step, uint64_t memory_bytes,
                                  const LinkCalibration& link) {
  PINION_RETURN_IF_ERROR(CheckPlannable(step));
  const Planner planner(step);
  if (const uint64_t least_bytes = planner.LeastBytes(); least_bytes > memory_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the step does not fit into ", memory_bytes, " bytes of device memory (",
                     HumanBytes(memory_bytes), "), whatever leaves: the least is ", least_bytes,
                     " bytes (", HumanBytes(least_bytes), ")"));
  }
  return BestWithin(step, planner, std::min(memory_bytes, planner.MostBytes()), link);
}

absl::StatusOr<StepPlan> PlanStepWithin(const StepRecord& step, double slowdown,
                                        const LinkCalibration& link) {
  PINION_RETURN_IF_ERROR(CheckPlannable(step));
  const Planner planner(step);
  const double allowed_us = slowdown * step.compute_us();
  uint64_t enough_bytes = planner.MostBytes();
  uint64_t too_little_bytes = planner.LeastBytes();
  PINION_ASSIGN_OR_RETURN(StepPlan best, BestWithin(step, planner, enough_bytes, link));
  PINION_ASSIGN_OR_RETURN(StepPlan tried, BestWithin(step, planner, too_little_bytes, link));
  if (tried.step_us <= allowed_us) return tried;
  // To a hundredth of what there is to gain.
  const uint64_t exact_bytes = (enough_bytes - too_little_bytes) / 100;
  while (enough_bytes - too_little_bytes > exact_bytes + 1) {
    const uint64_t middle_bytes = too_little_bytes + (enough_bytes - too_little_bytes) / 2;
    PINION_ASSIGN_OR_RETURN(tried, BestWithin(step, planner, middle_bytes, link));
    if (tried.step_us <= allowed_us) {
      enough_bytes = middle_bytes;
      best = std::move(tried);
    } else {
      too_little_bytes = middle_bytes;
    }
  }
  return best;
}

}  // namespace pinion
