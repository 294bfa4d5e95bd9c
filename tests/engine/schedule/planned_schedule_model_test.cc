// Steps of any shape, recorded and planned, then played exactly as they were recorded: what is on
// the device is counted here by hand, at the peak of each stretch and whenever it changes.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/liveness.h"
#include "pinion/engine/planner/plan_step.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/engine/schedule/cached_plan.h"
#include "pinion/engine/schedule/planned_schedule.h"
#include "pinion/tests/engine/planner/small_steps.h"
#include "pinion/tests/engine/schedule/target_player.h"

namespace pinion::testing {
namespace {

using ::testing::ElementsAreArray;

constexpr int kSteps = 300;
constexpr size_t kUses = 24;
constexpr uint32_t kMostObjects = 8;

// Objects are read in any order, as often as it comes. Some free nothing, some are held by the
// program, some computed again. As in every record, a
// stretch has at its peak at least what there was when it began.
StepRecord AnyStep(std::mt19937& random, uint64_t first_signature) {
  StepRecord step;
  const auto below = [&random](uint64_t end) { return random() % end; };
  uint32_t objects = 0;
  uint32_t operators = 0;
  while (step.uses.size() < kUses) {
    // A step goes on while anything is needed: the first object is read last.
    const bool ends = step.uses.size() + 1 == kUses;
    const bool makes = objects == 0 || (objects < kMostObjects && below(2) == 0 && !ends);
    step.uses.push_back(makes ? objects : static_cast<uint32_t>(ends ? 0 : below(objects)));
    if (makes) {
      StepObject object = {.size_bytes = 1 + below(100), .frees = below(6) > 0};
      object.signature = objects == 0 ? first_signature : below(3);
      if (below(4) == 0) object.held_until = static_cast<uint32_t>(step.uses.size() + below(12));
      if (below(8) == 0) object.recompute_us = static_cast<double>(below(3));
      step.objects.push_back(object);
      ++objects;
    }
    operators += below(3) > 0 ? 1 : 0;
    step.operators.push_back(operators);
  }
  uint64_t before_bytes = 0;
  for (size_t i = 0; i <= kUses; ++i) {
    const uint64_t other_bytes = 500 + below(60);
    const uint64_t peak_bytes = std::max(before_bytes, other_bytes) + below(2) * below(60);
    step.stretches.push_back({.compute_us = static_cast<double>(1 + below(100)),
                              .other_bytes = other_bytes,
                              .transient_bytes = peak_bytes - other_bytes});
    before_bytes = other_bytes;
  }
  return step;
}

// It saves the same, and from the last save on it reads otherwise.
StepRecord ReadOtherwise(StepRecord step, std::mt19937& random) {
  auto use = static_cast<size_t>(
      std::find(step.uses.begin(), step.uses.end(), step.objects.size() - 1) - step.uses.begin());
  for (++use; use + 1 < step.uses.size(); ++use) {
    step.uses[use] = static_cast<uint32_t>(random() % step.objects.size());
  }
  return step;
}

// Once it is read for the last time, nobody needs an object any more when another operator comes.
void LetGoOfWhatWasRead(StepRecord& step) {
  const std::vector<ObjectLife> lives = LivesOf(step);
  const std::vector<size_t> ends = OperatorEnds(step);
  for (size_t i = 0; i < lives.size(); ++i) {
    if (!lives[i].is_read) continue;
    step.objects[i].needed_until = static_cast<uint32_t>(ends[lives[i].uses.back()] + 1);
  }
}

class Played {
 public:
  Played(TargetSchedule& schedule, const KnownStep& known)
      : player_(schedule), step_(known.step()), plan_(known.plan()) {
    for (uint32_t use = 0; use < step_.uses.size(); ++use) {
      if (step_.uses[use] == firsts_.size()) firsts_.push_back(use);
      lasts_.resize(firsts_.size());
      lasts_[step_.uses[use]] = use;
    }
  }

  // The schedule `is_followed` by this plan from the beginning.
  void Run(uint64_t target_bytes, bool is_followed = true) {
    for (uint32_t use = 0; use < step_.uses.size(); ++use) {
      SCOPED_TRACE("use " + std::to_string(use));
      const uint32_t object = step_.uses[use];
      const bool makes = firsts_[object] == use;
      CheckPeakOf(use, makes && step_.objects[object].frees ? step_.objects[object].size_bytes : 0,
                  target_bytes);
      LetGoIn(use);
      player_.SetOtherBytes(step_.stretches[use].other_bytes);
      if (use > 0 && step_.operators[use] != step_.operators[use - 1]) ReleaseReadBefore(use);
      if (makes) {
        player_.Save(step_.objects[object].signature, step_.objects[object].size_bytes,
                     step_.operators[use], step_.objects[object].frees,
                     step_.objects[object].recompute_us.has_value());
        if (step_.objects[object].held_until > use) player_.Hold(object);
      } else {
        player_.Read(object, step_.operators[use]);
      }
      EXPECT_TRUE(player_.IsHere(object));
      std::vector<std::string> outs;
      const std::vector<std::string> drops = Drops(outs);
      if (is_followed) {
        EXPECT_THAT(drops, ElementsAreArray(PlannedDrops(use)));
        EXPECT_THAT(outs, ElementsAreArray(PlannedOuts(use)));
      }
    }
    CheckPeakOf(step_.uses.size(), 0, target_bytes);
    player_.EndStep();
  }

  // Objects that came back, by their reader and ahead.
  int demands() const { return demands_; }
  int fetches() const { return fetches_; }

 private:
  void CheckPeakOf(size_t stretch, uint64_t made_bytes, uint64_t target_bytes) {
    player_.SetOtherBytes(0);
    EXPECT_LE(player_.device_bytes() + step_.stretches[stretch].peak_other_bytes() + made_bytes,
              target_bytes)
        << "in stretch " << stretch;
  }

  bool IsComputedAgain(uint32_t object) const {
    return step_.objects[object].recompute_us.has_value();
  }

  // What the program holds no longer than to this stretch.
  void LetGoIn(size_t stretch) {
    for (uint32_t object = 0; object < lasts_.size(); ++object) {
      const bool is_made = firsts_[object] < stretch;
      if (is_made && step_.objects[object].held_until <= stretch) player_.LetGo(object);
    }
  }

  // Their operator has returned.
  void ReleaseReadBefore(uint32_t use) {
    for (uint32_t object = 0; object < lasts_.size(); ++object) {
      if (firsts_[object] < lasts_[object] && lasts_[object] < use) player_.Release(object);
    }
  }

  std::vector<std::string> Drops(std::vector<std::string>& outs) {
    std::vector<std::string> drops;
    for (std::string& note : player_.Happened()) {
      if (note.starts_with("demand")) ++demands_;
      if (note.starts_with("fetch")) ++fetches_;
      if (note.starts_with("drop")) {
        drops.push_back(std::move(note));
      } else if (note.starts_with("out")) {
        outs.push_back(std::move(note));
      }
    }
    std::sort(drops.begin(), drops.end());
    return drops;
  }
  std::vector<std::string> PlannedDrops(uint32_t use) const {
    std::vector<std::string> drops;
    for (const StepMove& move : plan_.moves) {
      if (move.drop_at == use && !IsComputedAgain(move.object))
        drops.push_back("drop " + std::to_string(move.object));
    }
    std::sort(drops.begin(), drops.end());
    return drops;
  }

  // In the order in which they go: behind those that leave by themselves, the ones that wait, by
  // when they are dropped.
  std::vector<std::string> PlannedOuts(uint32_t use) const {
    const std::vector<size_t> leaves_from = LeavesFrom(step_);
    std::map<std::pair<uint32_t, uint32_t>, std::string> outs;
    for (const StepMove& move : plan_.moves) {
      if (!move.copies_out) continue;
      const bool waits = move.copy_at != StepMove::kAtOnce;
      if ((waits ? move.copy_at : leaves_from[move.object]) != use) continue;
      outs[{waits ? move.drop_at : 0, move.object}] = "out " + std::to_string(move.object);
    }
    std::vector<std::string> in_order;
    for (auto& [place, out] : outs) in_order.push_back(std::move(out));
    return in_order;
  }

  TargetPlayer player_;
  const StepRecord& step_;
  const StepPlan& plan_;
  std::vector<uint32_t> firsts_;  // uses by object
  std::vector<uint32_t> lasts_;
  int demands_ = 0;
  int fetches_ = 0;
};

// The same plan, but some of its copies wait for others.
std::shared_ptr<const KnownStep> WithWaits(const KnownStep& known, std::mt19937& random) {
  StepPlan plan = known.plan();
  const std::vector<size_t> leaves_from = LeavesFrom(known.step());
  for (StepMove& move : plan.moves) {
    const auto ready_at = static_cast<uint32_t>(leaves_from[move.object]);
    if (!move.copies_out || random() % 3 > 0) continue;
    move.copy_at = ready_at + static_cast<uint32_t>(random() % (move.drop_at - ready_at + 1));
  }
  return std::make_shared<const KnownStep>(known.step(), std::move(plan));
}

bool IsComputedAgain(const StepRecord& step, const StepMove& move) {
  return step.objects[move.object].recompute_us.has_value();
}

// Fetches are asked for at reads, so that one whose time comes with the read itself, or with saves
// before it, is made by the reader.
int PlannedDemands(const KnownStep& known) {
  const StepRecord& step = known.step();
  const auto reads = [&](uint32_t use) { return known.Use(step.uses[use], 0) != use; };
  int demands = 0;
  for (const StepMove& move : known.plan().moves) {
    if (move.fetch_at == StepMove::kNever || IsComputedAgain(step, move)) continue;
    bool has_time = false;
    for (uint32_t use = move.fetch_at; use < move.read_at; ++use) has_time |= reads(use);
    if (!has_time) ++demands;
  }
  return demands;
}

int PlannedReturns(const KnownStep& known) {
  int returns = 0;
  for (const StepMove& move : known.plan().moves) {
    if (move.fetch_at != StepMove::kNever && !IsComputedAgain(known.step(), move)) ++returns;
  }
  return returns;
}

class TargetScheduleModelTest : public ::testing::TestWithParam<uint32_t> {};

INSTANTIATE_TEST_SUITE_P(Seeds, TargetScheduleModelTest, ::testing::Range(1u, 5u));

TEST_P(TargetScheduleModelTest, AKnownStepThatDoesAsRecordedKeepsWithinItsTarget) {
  std::mt19937 random(GetParam());
  int moves = 0;
  int again = 0;
  int computed = 0;
  int waiting = 0;
  int fetches = 0;
  for (int i = 0; i < kSteps && !HasFailure(); ++i) {
    SCOPED_TRACE(i);
    const StepRecord steps[] = {AnyStep(random, 100), AnyStep(random, 200)};
    uint64_t least_bytes = 0;
    for (const StepRecord& step : steps) {
      least_bytes = std::max(least_bytes, LeastMemoryBytes(step).value());
    }
    const uint64_t target_bytes = least_bytes + random() % 200;
    TargetSchedule schedule({.memory_bytes = target_bytes, .link = RoundLink()});
    std::shared_ptr<const KnownStep> known[2];
    for (size_t which : {0, 1}) {
      const std::shared_ptr<const KnownStep> planned = schedule.Plan(steps[which]).value();
      ASSERT_TRUE(planned->shortfall().ok());
      known[which] = WithWaits(*planned, random);
      schedule.Learn(known[which]);
    }
    for (size_t which : {0, 1, 1, 0}) {
      SCOPED_TRACE("step " + std::to_string(which));
      Played played(schedule, *known[which]);
      played.Run(target_bytes);
      EXPECT_EQ(played.demands(), PlannedDemands(*known[which]));
      EXPECT_EQ(played.demands() + played.fetches(), PlannedReturns(*known[which]));
      fetches += played.fetches();
    }
    for (const auto& step : known) {
      for (const StepMove& move : step->plan().moves) {
        ++(IsComputedAgain(step->step(), move) ? computed : move.copies_out ? moves : again);
        if (move.copy_at != StepMove::kAtOnce) ++waiting;
      }
    }
  }
  EXPECT_GT(moves, kSteps);
  EXPECT_GT(again, kSteps / 20);
  EXPECT_GT(computed, kSteps / 10);
  EXPECT_GT(waiting, kSteps / 2);
  EXPECT_GT(fetches, kSteps / 2);
}

// Whatever the one does that is not followed: nothing shows until it reads.
TEST_P(TargetScheduleModelTest, StepsThatSaveTheSameAndReadItOtherwiseKeepWithinTheirTarget) {
  std::mt19937 random(GetParam());
  int changes = 0;
  for (int i = 0; i < kSteps && !HasFailure(); ++i) {
    SCOPED_TRACE(i);
    StepRecord first = AnyStep(random, 100);
    for (StepStretch& stretch : first.stretches) {
      stretch.other_bytes = 500;  // a step that leaves reads out has no more than one that does not
      stretch.transient_bytes = 0;
    }
    StepRecord steps[] = {first, ReadOtherwise(first, random), ReadOtherwise(first, random)};
    uint64_t least_bytes = 0;
    for (StepRecord& step : steps) {
      LetGoOfWhatWasRead(step);
      least_bytes = std::max(least_bytes, LeastMemoryBytes(step).value());
    }
    const uint64_t target_bytes = least_bytes + random() % 200;
    TargetSchedule schedule({.memory_bytes = target_bytes, .link = RoundLink()});
    std::shared_ptr<const KnownStep> known[3];
    for (size_t which : {0, 1, 2}) known[which] = schedule.Plan(steps[which]).value();
    for (size_t which : {0, 1}) schedule.Learn(known[which]);
    for (size_t which : {0, 1, 2, 0}) {
      SCOPED_TRACE("step " + std::to_string(which));
      const auto last = schedule.known().front();
      Played(schedule, *known[which]).Run(target_bytes, /*is_followed=*/false);
      changes += schedule.followed() != last ? 1 : 0;
    }
  }
  EXPECT_GT(changes, kSteps);
}

}  // namespace
}  // namespace pinion::testing
