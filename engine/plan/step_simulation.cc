#include "pinion/engine/plan/step_simulation.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/plan/link_rates.h"
#include "pinion/engine/plan/step_lives.h"

namespace pinion {
namespace {

enum Direction { kOut, kIn };

// Both directions of a link with the copies that were submitted, at one moment.
class LinkModel {
 public:
  LinkModel(const LinkCalibration& link, const LinkRates& rates)
      : lanes_{{{link.d2h.fixed_us, rates.out, rates.duplex_out},
                {link.h2d.fixed_us, rates.in, rates.duplex_in}}} {}

  // The copy's number in its direction.
  size_t Submit(Direction direction, uint64_t size_bytes) {
    lanes_[direction].queue.push_back(static_cast<double>(size_bytes));
    return lanes_[direction].queue.size() - 1;
  }

  void AdvanceTo(double us) {
    while (now_us_ < us) Step(us);
    now_us_ = us;
  }

  // Goes on until the copy is done, if it is not.
  double DoneUs(Direction direction, size_t copy) {
    const Lane& lane = lanes_[direction];
    while (lane.done_us.size() <= copy) Step(std::numeric_limits<double>::infinity());
    return lane.done_us[copy];
  }

 private:
  struct Lane {
    double fixed_us;
    double alone;                      // bytes per us
    double duplex;                     // the same, while the other direction carries something
    std::vector<double> queue = {};    // bytes of each copy
    std::vector<double> done_us = {};  // of those that are done, which come first
    double fixed_done_us = 0;          // of the first of the others
    double done_bytes = 0;             // the same

    bool IsIdle() const { return done_us.size() == queue.size(); }
    bool Carries() const { return !IsIdle() && fixed_done_us >= fixed_us; }
    double Rate(const Lane& other) const { return other.Carries() ? duplex : alone; }
    // Until its copy is done, or past its fixed cost.
    double NextUs(double rate) const {
      if (IsIdle()) return std::numeric_limits<double>::infinity();
      if (!Carries()) return fixed_us - fixed_done_us;
      return (queue[done_us.size()] - done_bytes) / rate;
    }
  };

  // To the next moment at which a copy begins to carry or is done, or to `until_us`.
  void Step(double until_us) {
    const std::array<double, 2> rates = {lanes_[kOut].Rate(lanes_[kIn]),
                                         lanes_[kIn].Rate(lanes_[kOut])};
    const std::array<double, 2> next_us = {lanes_[kOut].NextUs(rates[kOut]),
                                           lanes_[kIn].NextUs(rates[kIn])};
    const double passed_us = std::min({next_us[kOut], next_us[kIn], until_us - now_us_});
    now_us_ += passed_us;
    const std::array<bool, 2> carried = {lanes_[kOut].Carries(), lanes_[kIn].Carries()};
    for (const Direction direction : {kOut, kIn}) {
      Lane& lane = lanes_[direction];
      if (lane.IsIdle()) continue;
      const bool reached = next_us[direction] <= passed_us;
      if (!carried[direction]) {
        lane.fixed_done_us = reached ? lane.fixed_us : lane.fixed_done_us + passed_us;
      } else if (reached) {
        lane.done_us.push_back(now_us_);
        lane.fixed_done_us = 0;
        lane.done_bytes = 0;
      } else {
        lane.done_bytes += passed_us * rates[direction];
      }
    }
  }

  double now_us_ = 0;
  std::array<Lane, 2> lanes_;
};

absl::Status CheckMoves(const StepRecord& step, absl::Span<const StepMove> moves) {
  for (const StepMove& move : moves) {
    if (move.object >= step.objects.size() || move.drop_at >= step.uses.size() ||
        (move.fetch_at != StepMove::kNever &&
         (move.fetch_at <= move.drop_at || move.read_at < move.fetch_at ||
          move.read_at >= step.uses.size()))) {
      return absl::InvalidArgumentError(absl::StrCat(
          "object ", move.object, " cannot leave at use ", move.drop_at, ", come back at ",
          move.fetch_at, " and be read at ", move.read_at, ": the step has ", step.objects.size(),
          " objects and ", step.uses.size(), " uses, which have to come in this order"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<StepTimes> SimulateStep(const StepRecord& step, absl::Span<const StepMove> moves,
                                       const LinkCalibration& link) {
  PINION_RETURN_IF_ERROR(step.Validate());
  PINION_RETURN_IF_ERROR(CheckMoves(step, moves));
  PINION_ASSIGN_OR_RETURN(const LinkRates rates, RatesOf(link));
  const std::vector<size_t> operator_ends = OperatorEnds(step);
  const size_t uses = step.uses.size();
  // What happens at each use, by move.
  struct AtUse {
    std::vector<size_t> copies_out, drops, fetches, reads;
  };
  std::vector<AtUse> at(uses);
  const std::vector<ObjectLife> lives = LivesOf(step);
  for (size_t i = 0; i < moves.size(); ++i) {
    const StepMove& move = moves[i];
    if (move.copies_out) {
      const size_t due =
          std::min<size_t>(operator_ends[lives[move.object].uses.front()] + 1, move.drop_at);
      at[due].copies_out.push_back(i);
    }
    at[move.drop_at].drops.push_back(i);
    if (move.fetch_at == StepMove::kNever) continue;
    at[move.fetch_at].fetches.push_back(i);
    at[move.read_at].reads.push_back(i);
  }
  StepTimes times;
  times.out_us.resize(moves.size());
  times.in_us.resize(moves.size());
  LinkModel model(link, rates);
  std::vector<size_t> out(moves.size());
  std::vector<size_t> in(moves.size());
  double now_us = 0;
  double stall_us = 0;
  const auto wait = [&](Direction direction, size_t copy) {
    const double done_us = model.DoneUs(direction, copy);
    stall_us += std::max(0.0, done_us - now_us);
    now_us = std::max(now_us, done_us);
    return done_us;
  };
  for (size_t i = 0; i <= uses; ++i) {
    times.begins_us.push_back(now_us);
    times.stalls_us.push_back(std::exchange(stall_us, 0));
    now_us += step.stretches[i].compute_us;
    if (i == uses) break;
    model.AdvanceTo(now_us);
    std::vector<size_t>& due = at[i].copies_out;
    std::sort(due.begin(), due.end(),
              [&](size_t a, size_t b) { return moves[a].object < moves[b].object; });
    for (const size_t move : due) {
      out[move] = model.Submit(kOut, step.objects[moves[move].object].size_bytes);
    }
    for (const size_t move : at[i].drops) {
      if (moves[move].copies_out) times.out_us[move] = wait(kOut, out[move]);
    }
    model.AdvanceTo(now_us);
    for (const size_t move : at[i].fetches) {
      in[move] = model.Submit(kIn, step.objects[moves[move].object].size_bytes);
    }
    for (const size_t move : at[i].reads) times.in_us[move] = wait(kIn, in[move]);
    model.AdvanceTo(now_us);
  }
  times.step_us = now_us;
  return times;
}

}  // namespace pinion
