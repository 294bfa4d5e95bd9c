// Checks the lower bound against every possible schedule of small steps.
//
// The model moves objects unit by unit. In each microsecond one unit may be copied out, one may be
// copied in, and the step may compute. An object occupies its full size from its first arriving
// unit until it is dropped, which is possible once the host has all of it. Its copy out starts no
// earlier than the next access by another operator. A breadth-first search over all states of
// device and host finds the shortest step. The model has no queue, no order and no reversed time,
// so it shares only the record with the bound.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/programs/step_bound.h"

namespace pinion::testing {
namespace {

constexpr uint64_t kUnitBytes = 1000;  // what a link of 1 GB/s carries in a microsecond
constexpr size_t kMaxObjects = 4;
constexpr int kTooLong = 60;

struct State {
  size_t interval = 0;
  int left_us = -1;  // of the interval; -1: it has not begun
  std::array<int, kMaxObjects> on_device{};
  std::array<int, kMaxObjects> on_host{};

  friend bool operator<(const State& a, const State& b) {
    return std::tie(a.interval, a.left_us, a.on_device, a.on_host) <
           std::tie(b.interval, b.left_us, b.on_device, b.on_host);
  }
};

class Model {
 public:
  // Where the directions hinder each other, only one of them carries anything in a microsecond.
  Model(const StepTrace& step, int memory, bool hinder)
      : step_(step), memory_(memory), hinder_(hinder) {}

  // Returns the shortest step, or kTooLong if it takes longer or nothing fits.
  int ShortestUs() const {
    State first;
    std::set<State> now;
    Reach(first, now);
    for (int us = 0; us < kTooLong; ++us) {
      std::set<State> next;
      for (const State& state : now) {
        if (IsOver(state)) return us;
        Tick(state, next);
      }
      now = std::move(next);
    }
    return kTooLong;
  }

 private:
  int Size(size_t object) const {
    return static_cast<int>(step_.objects[object].size_bytes / kUnitBytes);
  }
  // The ordinals of the object's first and last use.
  size_t First(size_t object) const {
    return static_cast<size_t>(std::find(step_.accesses.begin(), step_.accesses.end(), object) -
                               step_.accesses.begin());
  }
  size_t Last(size_t object) const {
    size_t last = 0;
    for (size_t access = 0; access < step_.accesses.size(); ++access) {
      if (step_.accesses[access] == object) last = access;
    }
    return last;
  }
  bool IsMadeIn(size_t object, size_t interval) const { return First(object) == interval; }
  // Whether those uses are one operator's: all between them are as well.
  bool IsOneOperator(size_t first, size_t last) const {
    if (first == last) return true;
    return !step_.operators.empty() && step_.operators[first] == step_.operators[last];
  }
  // Returns the last access that saves the object.
  size_t LastSave(size_t object) const {
    size_t last = First(object);
    for (size_t access = last; access <= step_.objects[object].saved_until; ++access) {
      if (step_.accesses[access] == object) last = access;
    }
    return last;
  }
  // The interval in which its operator goes on at the latest: it has returned by the next use of
  // another one, unless that saves the object, too.
  size_t LeavesBehind(size_t object) const {
    size_t save = First(object);
    for (size_t access = save + 1; access < step_.accesses.size(); ++access) {
      if (step_.accesses[access] == object && access <= step_.objects[object].saved_until) {
        save = access;
      } else if (!IsOneOperator(save, access)) {
        return access;
      }
    }
    return step_.accesses.size();
  }
  // The last interval in which somebody may ask for what is never read.
  size_t NeededUntil(size_t object) const {
    const size_t needed_until = step_.objects[object].needed_until;
    if (needed_until == 0) return step_.intervals.size() - 1;
    size_t end = Last(object);
    while (end + 1 < step_.accesses.size() && IsOneOperator(Last(object), end + 1)) ++end;
    return std::max(needed_until, end + 1);
  }
  // By the program, as long as anybody may ask for it.
  bool IsHeldIn(size_t object, size_t interval) const {
    const bool is_read = Last(object) > First(object);
    const size_t over = is_read ? Last(object) + 1 : NeededUntil(object);
    const size_t last_save = LastSave(object);
    const size_t saved_until = last_save > First(object) ? last_save + 1 : 0;
    return First(object) <= interval &&
           interval <=
               std::max(saved_until, std::min<size_t>(step_.objects[object].held_until, over));
  }
  bool IsRecast(size_t object) const { return step_.objects[object].recast_us.has_value(); }
  bool IsUsedIn(size_t object, size_t interval) const {
    if (IsMadeIn(object, interval) || IsHeldIn(object, interval)) return true;
    if (interval == 0 || step_.accesses[interval - 1] != object) return false;
    return First(object) != interval - 1;
  }
  bool Fits(const State& state) const {
    int bytes = static_cast<int>(step_.intervals[state.interval].other_bytes / kUnitBytes);
    for (size_t i = 0; i < step_.objects.size(); ++i) {
      if (state.on_device[i] > 0) bytes += Size(i);
    }
    return bytes <= memory_;
  }
  bool IsOver(const State& state) const { return state.interval == step_.intervals.size(); }

  // Adds `state` and all states that follow without time passing.
  void Reach(const State& state, std::set<State>& reached) const {
    if (!reached.insert(state).second) return;
    const bool runs = state.left_us >= 0;
    for (size_t i = 0; i < step_.objects.size(); ++i) {
      const bool used = runs && IsUsedIn(i, state.interval);
      if (!used && state.on_device[i] > 0 && state.on_host[i] == Size(i)) {
        State dropped = state;
        dropped.on_device[i] = 0;
        Reach(dropped, reached);
      }
    }
    if (state.interval == step_.intervals.size()) return;
    if (!runs) {
      State begun = state;
      begun.left_us = static_cast<int>(step_.intervals[state.interval].compute_us);
      for (size_t i = 0; i < step_.objects.size(); ++i) {
        const bool computed = IsRecast(i) && IsUsedIn(i, state.interval);
        if (computed || IsMadeIn(i, state.interval)) begun.on_device[i] = Size(i);
        if (IsUsedIn(i, state.interval) && begun.on_device[i] < Size(i)) return;
      }
      if (Fits(begun)) Reach(begun, reached);
    } else if (state.left_us == 0) {
      State ended = state;
      for (size_t i = 0; i < step_.objects.size(); ++i) {
        const bool made_here = IsMadeIn(i, state.interval);
        // A recast object needs no copy, as if the host had one.
        if (made_here && IsRecast(i)) ended.on_host[i] = Size(i);
        const bool is_read = Last(i) > First(i);
        const bool over =
            is_read ? Last(i) + 1 == state.interval : NeededUntil(i) == state.interval;
        if (over) ended.on_device[i] = 0;
      }
      ++ended.interval;
      ended.left_us = -1;
      Reach(ended, reached);
    }
  }

  bool MayLeave(const State& state, size_t object) const {
    return state.interval > LeavesBehind(object) && state.on_host[object] < Size(object);
  }
  bool MayComeIn(const State& state, size_t object) const {
    return state.interval > First(object) && state.on_device[object] < Size(object) &&
           state.on_host[object] > 0;
  }

  // Adds all states that are possible a microsecond later.
  void Tick(const State& state, std::set<State>& next) const {
    const size_t none = step_.objects.size();
    for (size_t out = 0; out <= none; ++out) {
      if (out != none && !MayLeave(state, out)) continue;
      for (size_t in = 0; in <= none; ++in) {
        if (in != none && !MayComeIn(state, in)) continue;
        if (hinder_ && out != none && in != none) continue;
        State later = state;
        if (out != none) ++later.on_host[out];
        if (in != none) ++later.on_device[in];
        if (later.left_us > 0) --later.left_us;
        if (later.left_us >= 0 && later.interval < step_.intervals.size() && !Fits(later)) continue;
        Reach(later, next);
      }
    }
  }

  const StepTrace& step_;
  const int memory_;
  const bool hinder_;
};

LinkCalibration OneUnitPerUs(bool hinder) {
  LinkCalibration link;
  link.d2h.gb_per_s = link.h2d.gb_per_s = 1;
  link.d2h_duplex_gb_per_s = link.h2d_duplex_gb_per_s = hinder ? 0.5 : 1;
  return link;
}

int Draw(std::mt19937& random, int from, int to) {
  return std::uniform_int_distribution<int>(from, to)(random);
}

// Uses in any order, objects of every kind.
StepTrace AnyStep(std::mt19937& random) {
  StepTrace step;
  const int accesses = Draw(random, 4, 8);
  for (int i = 0; i < accesses; ++i) {
    const int known = static_cast<int>(step.objects.size());
    const auto object =
        static_cast<uint32_t>(Draw(random, 0, std::min(known, static_cast<int>(kMaxObjects) - 1)));
    if (object == step.objects.size()) {
      StepObject made;
      made.size_bytes = static_cast<uint64_t>(Draw(random, 1, 2)) * kUnitBytes;
      if (Draw(random, 0, 5) == 0) made.held_until = static_cast<uint32_t>(Draw(random, 1, 6));
      if (Draw(random, 0, 4) == 0) made.recast_us = 0;
      if (Draw(random, 0, 2) == 0) made.needed_until = static_cast<uint32_t>(Draw(random, 1, 6));
      step.objects.push_back(made);
    }
    step.accesses.push_back(object);
  }
  step.intervals.resize(step.accesses.size() + 1);
  if (Draw(random, 0, 1) == 0) return step;
  uint32_t operators = 0;
  for (size_t access = 0; access < step.accesses.size(); ++access) {
    step.operators.push_back(operators);
    if (Draw(random, 0, 2) > 0) ++operators;
    // Some of the uses behind the first one save it again.
    StepObject& object = step.objects[step.accesses[access]];
    const bool is_first =
        std::find(step.accesses.begin(), step.accesses.end(), step.accesses[access]) ==
        step.accesses.begin() + static_cast<ptrdiff_t>(access);
    if (!is_first && Draw(random, 0, 2) == 0) {
      object.saved_until = static_cast<uint32_t>(access);
    }
  }
  return step;
}

// A forward and its backward.
StepTrace Chain(std::mt19937& random) {
  StepTrace step;
  const auto layers = static_cast<uint32_t>(Draw(random, 2, kMaxObjects));
  step.objects.resize(layers);
  for (StepObject& object : step.objects) {
    object.size_bytes = static_cast<uint64_t>(Draw(random, 1, 3)) * kUnitBytes;
  }
  for (uint32_t i = 0; i < layers; ++i) step.accesses.push_back(i);
  for (uint32_t i = layers; i-- > 0;) step.accesses.push_back(i);
  step.intervals.resize(step.accesses.size() + 1);
  return step;
}

void Fill(std::mt19937& random, StepTrace& step) {
  for (StepInterval& interval : step.intervals) {
    interval.compute_us = Draw(random, 0, 2);
    interval.other_bytes = static_cast<uint64_t>(Draw(random, 0, 2)) * kUnitBytes;
  }
}

double Bound(const StepTrace& step, int memory, bool hinder) {
  const absl::StatusOr<double> bound_us =
      StepLowerBoundUs(step, static_cast<uint64_t>(memory) * kUnitBytes, OneUnitPerUs(hinder));
  EXPECT_TRUE(bound_us.ok()) << bound_us.status();
  return bound_us.value_or(std::numeric_limits<double>::infinity());
}

// Total stalls of the best schedules, and how much of them the bound predicts.
struct Waiting {
  int steps = 0;
  double shortest_us = 0;
  double bound_us = 0;

  void Add(const StepTrace& step, int memory, bool hinder) {
    const int step_us = Model(step, memory, hinder).ShortestUs();
    const double step_bound_us = Bound(step, memory, hinder);
    if (std::isinf(step_bound_us)) {
      EXPECT_EQ(step_us, kTooLong);
      return;
    }
    EXPECT_LE(step_bound_us, step_us + 1e-9);
    if (step_us == kTooLong) return;
    steps += step_us > step.compute_us();
    shortest_us += step_us - step.compute_us();
    bound_us += step_bound_us - step.compute_us();
  }
};

TEST(StepBoundModelTest, NoScheduleBeatsTheBound) {
  Waiting waiting;
  for (unsigned seed = 0; seed < 11000; ++seed) {
    std::mt19937 random(seed);
    StepTrace step = AnyStep(random);
    Fill(random, step);
    const int memory = Draw(random, 2, 4);
    const bool hinder = Draw(random, 0, 1) == 1;
    SCOPED_TRACE(::testing::Message() << "seed " << seed << ", memory " << memory);
    waiting.Add(step, memory, hinder);
  }
  // A bound that is just the compute time would fail here.
  EXPECT_GT(waiting.steps, 500);
  EXPECT_GT(waiting.bound_us, 0.8 * waiting.shortest_us);
}

TEST(StepBoundModelTest, TheBestScheduleOfAForwardAndItsBackwardIsNearTheBound) {
  Waiting waiting;
  for (unsigned seed = 0; seed < 1500; ++seed) {
    std::mt19937 random(seed);
    StepTrace step = Chain(random);
    Fill(random, step);
    for (StepInterval& interval : step.intervals) interval.other_bytes = kUnitBytes;
    const int memory = Draw(random, 4, 8);
    SCOPED_TRACE(::testing::Message() << "seed " << seed << ", memory " << memory);
    waiting.Add(step, memory, /*hinder=*/true);
  }
  EXPECT_GT(waiting.steps, 300);
  EXPECT_GT(waiting.bound_us, 0.92 * waiting.shortest_us);
}

}  // namespace
}  // namespace pinion::testing
