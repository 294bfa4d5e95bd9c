// The bound against every schedule that there is, for steps that are small enough to try them all.
//
// The model moves objects unit by unit: in each microsecond one unit may leave, one may come in and
// the step may compute. An object takes all of its memory from when the first of it comes in until
// it is dropped, which it may be at any moment when the host has all of it, and none of it leaves
// before a use of another operator than the one that makes it. A breadth-first search over all that
// can be on the device and on the host finds the shortest step. It knows no queue, no order and no
// reversed time, so it shares nothing with the bound but what a record says.

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
  size_t stretch = 0;
  int left_us = -1;  // of the stretch; -1: it has not begun
  std::array<int, kMaxObjects> on_device{};
  std::array<int, kMaxObjects> on_host{};

  friend bool operator<(const State& a, const State& b) {
    return std::tie(a.stretch, a.left_us, a.on_device, a.on_host) <
           std::tie(b.stretch, b.left_us, b.on_device, b.on_host);
  }
};

class Model {
 public:
  // Where the directions hinder each other, only one of them carries anything in a microsecond.
  Model(const StepRecord& step, int memory, bool hinder)
      : step_(step), memory_(memory), hinder_(hinder) {}

  // The shortest step; kTooLong where it takes so long or does not fit at all.
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
    return static_cast<size_t>(std::find(step_.uses.begin(), step_.uses.end(), object) -
                               step_.uses.begin());
  }
  size_t Last(size_t object) const {
    size_t last = 0;
    for (size_t use = 0; use < step_.uses.size(); ++use) {
      if (step_.uses[use] == object) last = use;
    }
    return last;
  }
  bool IsMadeIn(size_t object, size_t stretch) const { return First(object) == stretch; }
  // Whether those uses are one operator's: all between them are as well.
  bool IsOneOperator(size_t first, size_t last) const {
    if (first == last) return true;
    return !step_.operators.empty() && step_.operators[first] == step_.operators[last];
  }
  // The last of the uses that save it.
  size_t LastSave(size_t object) const {
    size_t last = First(object);
    for (size_t use = last; use <= step_.objects[object].saved_until; ++use) {
      if (step_.uses[use] == object) last = use;
    }
    return last;
  }
  // The stretch in which its operator goes on at the latest: it has returned by the next use of
  // another one, unless that saves the object, too.
  size_t LeavesBehind(size_t object) const {
    size_t save = First(object);
    for (size_t use = save + 1; use < step_.uses.size(); ++use) {
      if (step_.uses[use] == object && use <= step_.objects[object].saved_until) {
        save = use;
      } else if (!IsOneOperator(save, use)) {
        return use;
      }
    }
    return step_.uses.size();
  }
  // The last stretch in which somebody may ask for what is never read.
  size_t NeededUntil(size_t object) const {
    const size_t needed_until = step_.objects[object].needed_until;
    if (needed_until == 0) return step_.stretches.size() - 1;
    size_t end = Last(object);
    while (end + 1 < step_.uses.size() && IsOneOperator(Last(object), end + 1)) ++end;
    return std::max(needed_until, end + 1);
  }
  // By the program, as long as anybody may ask for it.
  bool IsHeldIn(size_t object, size_t stretch) const {
    const bool is_read = Last(object) > First(object);
    const size_t over = is_read ? Last(object) + 1 : NeededUntil(object);
    const size_t last_save = LastSave(object);
    const size_t saved_until = last_save > First(object) ? last_save + 1 : 0;
    return First(object) <= stretch &&
           stretch <=
               std::max(saved_until, std::min<size_t>(step_.objects[object].held_until, over));
  }
  bool IsComputedAgain(size_t object) const {
    return step_.objects[object].recompute_us.has_value();
  }
  bool IsUsedIn(size_t object, size_t stretch) const {
    if (IsMadeIn(object, stretch) || IsHeldIn(object, stretch)) return true;
    if (stretch == 0 || step_.uses[stretch - 1] != object) return false;
    return First(object) != stretch - 1;
  }
  bool Fits(const State& state) const {
    int bytes = static_cast<int>(step_.stretches[state.stretch].other_bytes / kUnitBytes);
    for (size_t i = 0; i < step_.objects.size(); ++i) {
      if (state.on_device[i] > 0) bytes += Size(i);
    }
    return bytes <= memory_;
  }
  bool IsOver(const State& state) const { return state.stretch == step_.stretches.size(); }

  // Adds what takes no time from `state`, and that itself.
  void Reach(const State& state, std::set<State>& reached) const {
    if (!reached.insert(state).second) return;
    const bool runs = state.left_us >= 0;
    for (size_t i = 0; i < step_.objects.size(); ++i) {
      const bool used = runs && IsUsedIn(i, state.stretch);
      if (!used && state.on_device[i] > 0 && state.on_host[i] == Size(i)) {
        State dropped = state;
        dropped.on_device[i] = 0;
        Reach(dropped, reached);
      }
    }
    if (state.stretch == step_.stretches.size()) return;
    if (!runs) {
      State begun = state;
      begun.left_us = static_cast<int>(step_.stretches[state.stretch].compute_us);
      for (size_t i = 0; i < step_.objects.size(); ++i) {
        const bool computed = IsComputedAgain(i) && IsUsedIn(i, state.stretch);
        if (computed || IsMadeIn(i, state.stretch)) begun.on_device[i] = Size(i);
        if (IsUsedIn(i, state.stretch) && begun.on_device[i] < Size(i)) return;
      }
      if (Fits(begun)) Reach(begun, reached);
    } else if (state.left_us == 0) {
      State ended = state;
      for (size_t i = 0; i < step_.objects.size(); ++i) {
        const bool made_here = IsMadeIn(i, state.stretch);
        // What is computed again takes no copy, as if the host had it.
        if (made_here && IsComputedAgain(i)) ended.on_host[i] = Size(i);
        const bool is_read = Last(i) > First(i);
        const bool over = is_read ? Last(i) + 1 == state.stretch : NeededUntil(i) == state.stretch;
        if (over) ended.on_device[i] = 0;
      }
      ++ended.stretch;
      ended.left_us = -1;
      Reach(ended, reached);
    }
  }

  bool MayLeave(const State& state, size_t object) const {
    return state.stretch > LeavesBehind(object) && state.on_host[object] < Size(object);
  }
  bool MayComeIn(const State& state, size_t object) const {
    return state.stretch > First(object) && state.on_device[object] < Size(object) &&
           state.on_host[object] > 0;
  }

  // Adds what can be a microsecond later.
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
        if (later.left_us >= 0 && later.stretch < step_.stretches.size() && !Fits(later)) continue;
        Reach(later, next);
      }
    }
  }

  const StepRecord& step_;
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
StepRecord AnyStep(std::mt19937& random) {
  StepRecord step;
  const int uses = Draw(random, 4, 8);
  for (int i = 0; i < uses; ++i) {
    const int known = static_cast<int>(step.objects.size());
    const auto object =
        static_cast<uint32_t>(Draw(random, 0, std::min(known, static_cast<int>(kMaxObjects) - 1)));
    if (object == step.objects.size()) {
      StepObject made;
      made.size_bytes = static_cast<uint64_t>(Draw(random, 1, 2)) * kUnitBytes;
      if (Draw(random, 0, 5) == 0) made.held_until = static_cast<uint32_t>(Draw(random, 1, 6));
      if (Draw(random, 0, 4) == 0) made.recompute_us = 0;
      if (Draw(random, 0, 2) == 0) made.needed_until = static_cast<uint32_t>(Draw(random, 1, 6));
      step.objects.push_back(made);
    }
    step.uses.push_back(object);
  }
  step.stretches.resize(step.uses.size() + 1);
  if (Draw(random, 0, 1) == 0) return step;
  uint32_t operators = 0;
  for (size_t use = 0; use < step.uses.size(); ++use) {
    step.operators.push_back(operators);
    if (Draw(random, 0, 2) > 0) ++operators;
    // Some of the uses behind the first one save it again.
    StepObject& object = step.objects[step.uses[use]];
    const bool is_first = std::find(step.uses.begin(), step.uses.end(), step.uses[use]) ==
                          step.uses.begin() + static_cast<ptrdiff_t>(use);
    if (!is_first && Draw(random, 0, 2) == 0) {
      object.saved_until = static_cast<uint32_t>(use);
    }
  }
  return step;
}

// A forward and its backward.
StepRecord Chain(std::mt19937& random) {
  StepRecord step;
  const auto layers = static_cast<uint32_t>(Draw(random, 2, kMaxObjects));
  step.objects.resize(layers);
  for (StepObject& object : step.objects) {
    object.size_bytes = static_cast<uint64_t>(Draw(random, 1, 3)) * kUnitBytes;
  }
  for (uint32_t i = 0; i < layers; ++i) step.uses.push_back(i);
  for (uint32_t i = layers; i-- > 0;) step.uses.push_back(i);
  step.stretches.resize(step.uses.size() + 1);
  return step;
}

void Fill(std::mt19937& random, StepRecord& step) {
  for (StepStretch& stretch : step.stretches) {
    stretch.compute_us = Draw(random, 0, 2);
    stretch.other_bytes = static_cast<uint64_t>(Draw(random, 0, 2)) * kUnitBytes;
  }
}

double Bound(const StepRecord& step, int memory, bool hinder) {
  const absl::StatusOr<double> bound_us =
      StepLowerBoundUs(step, static_cast<uint64_t>(memory) * kUnitBytes, OneUnitPerUs(hinder));
  EXPECT_TRUE(bound_us.ok()) << bound_us.status();
  return bound_us.value_or(std::numeric_limits<double>::infinity());
}

// Of many steps, how long the best schedules wait, and of that what the bound knows.
struct Waiting {
  int steps = 0;
  double shortest_us = 0;
  double bound_us = 0;

  void Add(const StepRecord& step, int memory, bool hinder) {
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
    StepRecord step = AnyStep(random);
    Fill(random, step);
    const int memory = Draw(random, 2, 4);
    const bool hinder = Draw(random, 0, 1) == 1;
    SCOPED_TRACE(::testing::Message() << "seed " << seed << ", memory " << memory);
    waiting.Add(step, memory, hinder);
  }
  // The compute alone would pass as well.
  EXPECT_GT(waiting.steps, 500);
  EXPECT_GT(waiting.bound_us, 0.8 * waiting.shortest_us);
}

TEST(StepBoundModelTest, TheBestScheduleOfAForwardAndItsBackwardIsNearTheBound) {
  Waiting waiting;
  for (unsigned seed = 0; seed < 1500; ++seed) {
    std::mt19937 random(seed);
    StepRecord step = Chain(random);
    Fill(random, step);
    for (StepStretch& stretch : step.stretches) stretch.other_bytes = kUnitBytes;
    const int memory = Draw(random, 4, 8);
    SCOPED_TRACE(::testing::Message() << "seed " << seed << ", memory " << memory);
    waiting.Add(step, memory, /*hinder=*/true);
  }
  EXPECT_GT(waiting.steps, 300);
  EXPECT_GT(waiting.bound_us, 0.92 * waiting.shortest_us);
}

}  // namespace
}  // namespace pinion::testing
