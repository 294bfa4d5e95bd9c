// Plays random steps exactly as they were recorded and planned. The test counts the device's bytes
// itself, at the peak of each interval and at each change.

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
#include "pinion/engine/schedule/plan_cache.h"
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
// interval has at its peak at least what there was when it began.
StepTrace AnyStep(std::mt19937& random, uint64_t first_signature) {
  StepTrace step;
  const auto below = [&random](uint64_t end) { return random() % end; };
  uint32_t objects = 0;
  uint32_t operators = 0;
  while (step.accesses.size() < kUses) {
    // A step goes on while anything is needed: the first object is read last.
    const bool ends = step.accesses.size() + 1 == kUses;
    const bool makes = objects == 0 || (objects < kMostObjects && below(2) == 0 && !ends);
    step.accesses.push_back(makes ? objects : static_cast<uint32_t>(ends ? 0 : below(objects)));
    if (makes) {
      StepObject object = {.size_bytes = 1 + below(100), .frees = below(6) > 0};
      object.signature = objects == 0 ? first_signature : below(3);
      if (below(4) == 0)
        object.held_until = static_cast<uint32_t>(step.accesses.size() + below(12));
      if (below(8) == 0) object.recast_us = static_cast<double>(below(3));
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
    step.intervals.push_back({.compute_us = static_cast<double>(1 + below(100)),
                              .other_bytes = other_bytes,
                              .transient_bytes = peak_bytes - other_bytes});
    before_bytes = other_bytes;
  }
  return step;
}

// It saves the same, and from the last save on it reads otherwise.
StepTrace ReadOtherwise(StepTrace step, std::mt19937& random) {
  auto access = static_cast<size_t>(
      std::find(step.accesses.begin(), step.accesses.end(), step.objects.size() - 1) -
      step.accesses.begin());
  for (++access; access + 1 < step.accesses.size(); ++access) {
    step.accesses[access] = static_cast<uint32_t>(random() % step.objects.size());
  }
  return step;
}

// Once it is read for the last time, nobody needs an object any more when another operator comes.
void LetGoOfWhatWasRead(StepTrace& step) {
  const std::vector<ObjectLiveness> lives = LivenessOf(step);
  const std::vector<size_t> ends = OperatorEnds(step);
  for (size_t i = 0; i < lives.size(); ++i) {
    if (!lives[i].is_read()) continue;
    step.objects[i].needed_until = static_cast<uint32_t>(ends[lives[i].accesses.back()] + 1);
  }
}

class Played {
 public:
  Played(PlannedSchedule& schedule, const CachedPlan& cached)
      : player_(schedule), step_(cached.step()), plan_(cached.plan()) {
    for (uint32_t access = 0; access < step_.accesses.size(); ++access) {
      if (step_.accesses[access] == firsts_.size()) firsts_.push_back(access);
      lasts_.resize(firsts_.size());
      lasts_[step_.accesses[access]] = access;
    }
  }

  // The schedule `is_followed` by this plan from the beginning.
  void Run(uint64_t target_bytes, bool is_followed = true) {
    for (uint32_t access = 0; access < step_.accesses.size(); ++access) {
      SCOPED_TRACE("access " + std::to_string(access));
      const uint32_t object = step_.accesses[access];
      const bool makes = firsts_[object] == access;
      CheckPeakOf(access,
                  makes && step_.objects[object].frees ? step_.objects[object].size_bytes : 0,
                  target_bytes);
      LetGoIn(access);
      player_.SetOtherBytes(step_.intervals[access].other_bytes);
      if (access > 0 && step_.operators[access] != step_.operators[access - 1])
        ReleaseReadBefore(access);
      const StepObject& accessed = step_.objects[object];
      TargetPlayer::Log log =
          makes ? player_.Save(accessed.signature, accessed.size_bytes, step_.operators[access],
                               accessed.frees, accessed.recast_us.has_value())
                : player_.Read(object, step_.operators[access]);
      if (makes && accessed.held_until > access) player_.Hold(object);
      EXPECT_TRUE(player_.IsHere(object));
      std::vector<std::string> outs;
      const std::vector<std::string> evictions = Drops(std::move(log), outs);
      if (is_followed) {
        EXPECT_THAT(evictions, ElementsAreArray(PlannedDrops(access)));
        EXPECT_THAT(outs, ElementsAreArray(PlannedOuts(access)));
      }
    }
    CheckPeakOf(step_.accesses.size(), 0, target_bytes);
    player_.EndStep();
  }

  // Objects that came back, by their reader and ahead.
  int demands() const { return demands_; }
  int fetches() const { return fetches_; }

 private:
  void CheckPeakOf(size_t interval, uint64_t made_bytes, uint64_t target_bytes) {
    player_.SetOtherBytes(0);
    EXPECT_LE(player_.device_bytes() + step_.intervals[interval].peak_other_bytes() + made_bytes,
              target_bytes)
        << "in interval " << interval;
  }

  bool IsComputedAgain(uint32_t object) const {
    return step_.objects[object].recast_us.has_value();
  }

  // Ends the program's references that last to this interval.
  void LetGoIn(size_t interval) {
    for (uint32_t object = 0; object < lasts_.size(); ++object) {
      const bool is_made = firsts_[object] < interval;
      if (is_made && step_.objects[object].held_until <= interval) player_.LetGo(object);
    }
  }

  // Their operator has returned.
  void ReleaseReadBefore(uint32_t access) {
    for (uint32_t object = 0; object < lasts_.size(); ++object) {
      if (firsts_[object] < lasts_[object] && lasts_[object] < access) player_.Release(object);
    }
  }

  std::vector<std::string> Drops(TargetPlayer::Log log, std::vector<std::string>& outs) {
    std::vector<std::string> evictions;
    for (std::string& note : log) {
      if (note.starts_with("demand")) ++demands_;
      if (note.starts_with("fetch")) ++fetches_;
      if (note.starts_with("drop")) {
        evictions.push_back(std::move(note));
      } else if (note.starts_with("out")) {
        outs.push_back(std::move(note));
      }
    }
    std::sort(evictions.begin(), evictions.end());
    return evictions;
  }
  std::vector<std::string> PlannedDrops(uint32_t access) const {
    std::vector<std::string> evictions;
    for (const StepMove& move : plan_.moves) {
      if (move.evict_at == access && !IsComputedAgain(move.object))
        evictions.push_back("drop " + std::to_string(move.object));
    }
    std::sort(evictions.begin(), evictions.end());
    return evictions;
  }

  // In the order in which they go: behind those that leave by themselves, the ones that wait, by
  // when they are dropped.
  std::vector<std::string> PlannedOuts(uint32_t access) const {
    const std::vector<size_t> leaves_from = EarliestOffloads(step_);
    std::map<std::pair<uint32_t, uint32_t>, std::string> outs;
    for (const StepMove& move : plan_.moves) {
      if (!move.copies_out) continue;
      const bool waits = move.copy_at != StepMove::kAtOnce;
      if ((waits ? move.copy_at : leaves_from[move.object]) != access) continue;
      outs[{waits ? move.evict_at : 0, move.object}] = "out " + std::to_string(move.object);
    }
    std::vector<std::string> in_order;
    for (auto& [place, out] : outs) in_order.push_back(std::move(out));
    return in_order;
  }

  TargetPlayer player_;
  const StepTrace& step_;
  const StepPlan& plan_;
  std::vector<uint32_t> firsts_;  // uses by object
  std::vector<uint32_t> lasts_;
  int demands_ = 0;
  int fetches_ = 0;
};

// The same plan, but some of its copies wait for others.
std::shared_ptr<const CachedPlan> WithWaits(const CachedPlan& cached, std::mt19937& random) {
  StepPlan plan = cached.plan();
  const std::vector<size_t> leaves_from = EarliestOffloads(cached.step());
  for (StepMove& move : plan.moves) {
    const auto ready_at = static_cast<uint32_t>(leaves_from[move.object]);
    if (!move.copies_out || random() % 3 > 0) continue;
    move.copy_at = ready_at + static_cast<uint32_t>(random() % (move.evict_at - ready_at + 1));
  }
  return std::make_shared<const CachedPlan>(cached.step(), std::move(plan));
}

bool IsComputedAgain(const StepTrace& step, const StepMove& move) {
  return step.objects[move.object].recast_us.has_value();
}

// Fetches are asked for at reads, so that one whose time comes with the read itself, or with saves
// before it, is made by the reader.
int PlannedDemands(const CachedPlan& cached) {
  const StepTrace& step = cached.step();
  const auto reads = [&](uint32_t access) {
    return cached.AccessIndex(step.accesses[access], 0) != access;
  };
  int demands = 0;
  for (const StepMove& move : cached.plan().moves) {
    if (move.fetch_at == StepMove::kNever || IsComputedAgain(step, move)) continue;
    bool has_time = false;
    for (uint32_t access = move.fetch_at; access < move.read_at; ++access)
      has_time |= reads(access);
    if (!has_time) ++demands;
  }
  return demands;
}

int PlannedReturns(const CachedPlan& cached) {
  int returns = 0;
  for (const StepMove& move : cached.plan().moves) {
    if (move.fetch_at != StepMove::kNever && !IsComputedAgain(cached.step(), move)) ++returns;
  }
  return returns;
}

class PlannedScheduleModelTest : public ::testing::TestWithParam<uint32_t> {};

INSTANTIATE_TEST_SUITE_P(Seeds, PlannedScheduleModelTest, ::testing::Range(1u, 5u));

TEST_P(PlannedScheduleModelTest, AKnownStepThatDoesAsRecordedKeepsWithinItsTarget) {
  std::mt19937 random(GetParam());
  int moves = 0;
  int again = 0;
  int computed = 0;
  int waiting = 0;
  int fetches = 0;
  for (int i = 0; i < kSteps && !HasFailure(); ++i) {
    SCOPED_TRACE(i);
    const StepTrace steps[] = {AnyStep(random, 100), AnyStep(random, 200)};
    uint64_t least_bytes = 0;
    for (const StepTrace& step : steps) {
      least_bytes = std::max(least_bytes, LeastMemoryBytes(step).value());
    }
    const uint64_t target_bytes = least_bytes + random() % 200;
    PlannedSchedule schedule({.memory_bytes = target_bytes, .link = RoundLink()});
    std::shared_ptr<const CachedPlan> cached[2];
    for (size_t which : {0, 1}) {
      const std::shared_ptr<const CachedPlan> planned = schedule.Plan(steps[which]).value();
      ASSERT_TRUE(planned->shortfall().ok());
      cached[which] = WithWaits(*planned, random);
      schedule.Learn(cached[which]);
    }
    for (size_t which : {0, 1, 1, 0}) {
      SCOPED_TRACE("step " + std::to_string(which));
      Played played(schedule, *cached[which]);
      played.Run(target_bytes);
      EXPECT_EQ(played.demands(), PlannedDemands(*cached[which]));
      EXPECT_EQ(played.demands() + played.fetches(), PlannedReturns(*cached[which]));
      fetches += played.fetches();
    }
    for (const auto& step : cached) {
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
TEST_P(PlannedScheduleModelTest, StepsThatSaveTheSameAndReadItOtherwiseKeepWithinTheirTarget) {
  std::mt19937 random(GetParam());
  int changes = 0;
  for (int i = 0; i < kSteps && !HasFailure(); ++i) {
    SCOPED_TRACE(i);
    StepTrace first = AnyStep(random, 100);
    for (StepInterval& interval : first.intervals) {
      interval.other_bytes =
          500;  // a step that leaves reads out has no more than one that does not
      interval.transient_bytes = 0;
    }
    StepTrace steps[] = {first, ReadOtherwise(first, random), ReadOtherwise(first, random)};
    uint64_t least_bytes = 0;
    for (StepTrace& step : steps) {
      LetGoOfWhatWasRead(step);
      least_bytes = std::max(least_bytes, LeastMemoryBytes(step).value());
    }
    const uint64_t target_bytes = least_bytes + random() % 200;
    PlannedSchedule schedule({.memory_bytes = target_bytes, .link = RoundLink()});
    std::shared_ptr<const CachedPlan> cached[3];
    for (size_t which : {0, 1, 2}) cached[which] = schedule.Plan(steps[which]).value();
    for (size_t which : {0, 1}) schedule.Learn(cached[which]);
    for (size_t which : {0, 1, 2, 0}) {
      SCOPED_TRACE("step " + std::to_string(which));
      const auto last = schedule.cached().front();
      Played(schedule, *cached[which]).Run(target_bytes, /*is_followed=*/false);
      changes += schedule.followed() != last ? 1 : 0;
    }
  }
  EXPECT_GT(changes, kSteps);
}

}  // namespace
}  // namespace pinion::testing
