#include "pinion/engine/planner/step_simulation.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <tuple>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/planner/liveness.h"

namespace pinion {
namespace {

enum Direction { kOut, kIn };

// Both directions of a link at one moment, with the submitted copies.
class LinkModel {
 public:
  LinkModel(const LinkCalibration& link, const LinkRates& rates)
      : lanes_{{{link.d2h.fixed_us, rates.out, rates.duplex_out},
                {link.h2d.fixed_us, rates.in, rates.duplex_in}}} {}

  // Returns the copy's number in its direction.
  size_t Submit(Direction direction, uint64_t size_bytes) {
    Lane& lane = lanes_[direction];
    if (lane.IsIdle()) lane.begun_us.push_back(now_us_);
    lane.queue.push_back(static_cast<double>(size_bytes));
    return lane.queue.size() - 1;
  }

  void AdvanceTo(double us) {
    while (now_us_ < us) Step(us);
    now_us_ = us;
  }

  // Of a finished copy.
  double BegunUs(Direction direction, size_t copy) const {
    return lanes_[direction].begun_us[copy];
  }

  // Advances until the copy is done.
  double DoneUs(Direction direction, size_t copy) {
    const Lane& lane = lanes_[direction];
    while (lane.done_us.size() <= copy) Step(std::numeric_limits<double>::infinity());
    return lane.done_us[copy];
  }

 private:
  struct Lane {
    double fixed_us;
    double alone;                       // bytes per us
    double duplex;                      // the same, while the other direction transfers
    std::vector<double> queue = {};     // bytes of each copy
    std::vector<double> begun_us = {};  // of copies that have begun, which come first
    std::vector<double> done_us = {};   // of finished copies, which come first
    double fixed_done_us = 0;           // of the first unfinished copy
    double done_bytes = 0;              // the same

    bool IsIdle() const { return done_us.size() == queue.size(); }
    bool Carries() const { return !IsIdle() && fixed_done_us >= fixed_us; }
    double Rate(const Lane& other) const { return other.Carries() ? duplex : alone; }
    // Time until its copy has paid its fixed cost, or is done.
    double NextUs(double rate) const {
      if (IsIdle()) return std::numeric_limits<double>::infinity();
      if (!Carries()) return fixed_us - fixed_done_us;
      return (queue[done_us.size()] - done_bytes) / rate;
    }
  };

  // Advances to the next moment at which a copy begins to transfer or ends, or to `until_us`.
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
        if (!lane.IsIdle()) lane.begun_us.push_back(now_us_);
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

// Order of the copies out that are submitted at the same access.
std::tuple<bool, uint32_t, uint32_t> PlaceOf(const StepMove& move) {
  const bool waits = move.copy_at != StepMove::kAtOnce;
  return {waits, waits ? move.evict_at : 0, move.object};
}

// Indices of moves by the access at which something happens, in the order of moves.
class ByAccess {
 public:
  // `access_of` returns kNever where nothing happens.
  template <typename AccessOf>
  ByAccess(size_t accesses, absl::Span<const StepMove> moves, AccessOf access_of)
      : begins_(accesses + 1) {
    std::vector<uint32_t> at;
    for (const StepMove& move : moves) {
      at.push_back(access_of(move));
      if (at.back() != StepMove::kNever) ++begins_[at.back()];
    }
    uint32_t before = 0;
    for (uint32_t& begin : begins_) before += std::exchange(begin, before);
    moves_.resize(before);
    std::vector<uint32_t> next = begins_;
    for (uint32_t i = 0; i < at.size(); ++i) {
      if (at[i] != StepMove::kNever) moves_[next[at[i]]++] = i;
    }
  }

  absl::Span<uint32_t> operator[](size_t access) {
    return absl::MakeSpan(moves_).subspan(begins_[access], begins_[access + 1] - begins_[access]);
  }

 private:
  std::vector<uint32_t> begins_;  // by access: its first index in `moves_`
  std::vector<uint32_t> moves_;
};

}  // namespace

absl::Status CheckMoves(const StepTrace& step, absl::Span<const StepMove> moves) {
  PINION_RETURN_IF_ERROR(step.Validate());
  for (const StepMove& move : moves) {
    if (move.object >= step.objects.size() || move.evict_at >= step.accesses.size() ||
        move.copy_at > move.evict_at ||
        (move.fetch_at != StepMove::kNever &&
         (move.fetch_at <= move.evict_at || move.read_at < move.fetch_at ||
          move.read_at >= step.accesses.size()))) {
      return absl::InvalidArgumentError(absl::StrCat(
          "object ", move.object, " cannot be copied at access ", move.copy_at,
          ", be evicted at access ", move.evict_at, ", be fetched at ", move.fetch_at,
          " and be read at ", move.read_at, ": the step has ", step.objects.size(), " objects and ",
          step.accesses.size(), " accesses, which have to come in this order"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<StepSimulator> StepSimulator::Create(const StepTrace& step,
                                                    const LinkCalibration& link) {
  PINION_ASSIGN_OR_RETURN(const LinkRates rates, RatesOf(link));
  return StepSimulator(step, link, rates);
}

StepSimulator::StepSimulator(const StepTrace& step, const LinkCalibration& link,
                             const LinkRates& rates)
    : step_(&step), link_(link), rates_(rates), leaves_from_(EarliestOffloads(step)) {}

absl::StatusOr<StepTimes> SimulateStep(const StepTrace& step, absl::Span<const StepMove> moves,
                                       const LinkCalibration& link) {
  PINION_RETURN_IF_ERROR(CheckMoves(step, moves));
  PINION_ASSIGN_OR_RETURN(const StepSimulator simulator, StepSimulator::Create(step, link));
  return simulator.Run(moves);
}

StepTimes StepSimulator::Run(absl::Span<const StepMove> moves) const {
  const StepTrace& step = *step_;
  const size_t accesses = step.accesses.size();
  ByAccess copies_out(accesses, moves, [this](const StepMove& move) {
    if (!move.copies_out) return StepMove::kNever;
    const size_t ready_at = std::min<size_t>(leaves_from_[move.object], move.evict_at);
    return std::max(move.copy_at, static_cast<uint32_t>(ready_at));
  });
  ByAccess evictions(accesses, moves, [](const StepMove& move) { return move.evict_at; });
  ByAccess fetches(accesses, moves, [](const StepMove& move) { return move.fetch_at; });
  ByAccess reads(accesses, moves, [](const StepMove& move) {
    return move.fetch_at == StepMove::kNever ? StepMove::kNever : move.read_at;
  });
  StepTimes times;
  for (auto* of_moves : {&times.out_begins_us, &times.out_us, &times.in_begins_us, &times.in_us}) {
    of_moves->resize(moves.size());
  }
  LinkModel model(link_, rates_);
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
  for (size_t i = 0; i <= accesses; ++i) {
    times.begins_us.push_back(now_us);
    times.stalls_us.push_back(std::exchange(stall_us, 0));
    now_us += step.intervals[i].compute_us;
    if (i == accesses) break;
    model.AdvanceTo(now_us);
    const absl::Span<uint32_t> due = copies_out[i];
    std::sort(due.begin(), due.end(),
              [&](uint32_t a, uint32_t b) { return PlaceOf(moves[a]) < PlaceOf(moves[b]); });
    for (const uint32_t move : due) {
      out[move] = model.Submit(kOut, step.objects[moves[move].object].size_bytes);
    }
    for (const uint32_t move : evictions[i]) {
      if (!moves[move].copies_out) continue;
      times.out_us[move] = wait(kOut, out[move]);
      times.out_begins_us[move] = model.BegunUs(kOut, out[move]);
    }
    model.AdvanceTo(now_us);
    for (const uint32_t move : fetches[i]) {
      if (step.objects[moves[move].object].recast_us.has_value()) continue;
      in[move] = model.Submit(kIn, step.objects[moves[move].object].size_bytes);
    }
    for (const uint32_t move : reads[i]) {
      if (const auto& recast_us = step.objects[moves[move].object].recast_us) {
        times.in_begins_us[move] = now_us;
        times.in_us[move] = now_us += *recast_us;
        continue;
      }
      times.in_us[move] = wait(kIn, in[move]);
      times.in_begins_us[move] = model.BegunUs(kIn, in[move]);
    }
    model.AdvanceTo(now_us);
  }
  times.step_us = now_us;
  return times;
}

}  // namespace pinion
