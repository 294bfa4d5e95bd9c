// Checks a memory target: the first step uses the least memory and is recorded, and later steps run
// as planned. The emulated device refuses every byte above the target.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace offload_target_test {

using ::testing::AllOf;
using ::testing::Eq;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr NetShape kShape = {.layers = 6, .batch = 4, .tokens = 64, .channels = 64, .heads = 4};

NetShape Longer() {
  NetShape shape = kShape;
  shape.tokens = 96;
  return shape;
}

// Runs a net's steps and returns the results of each.
class TargetWorld : public EmuWorld {
 public:
  explicit TargetWorld(uint64_t target_bytes, const EmulatedOptions& machine = MachineOptions())
      : EmuWorld(machine, WithTarget(target_bytes)) {}

  // Limits the device's memory.
  void Limit(uint64_t size_bytes) { EXPECT_THAT(machine().SetMemoryLimit(0, size_bytes), IsOk()); }

  struct Step {
    Gradients gradients;
    OffloadStats stats;  // of this step, for the fields that are read here
    uint64_t peak_bytes = 0;
    double ms = 0;  // modelled
  };
  Step Run(const TestNet& net, bool offload = true) {
    EXPECT_THAT(Synchronize(), IsOk());
    ResetPeak();
    const OffloadStats before = QuietStats();
    const double begin_ms = machine().now_ms();
    Step step;
    step.gradients = TrainStep(net, offload ? session() : nullptr);
    EXPECT_THAT(Synchronize(), IsOk());
    step.ms = machine().now_ms() - begin_ms;
    step.peak_bytes = peak_device_bytes();
    const OffloadStats after = QuietStats();
    step.stats.offloaded = after.offloaded - before.offloaded;
    step.stats.kept_as_planned = after.kept_as_planned - before.kept_as_planned;
    step.stats.evicted_bytes = after.evicted_bytes - before.evicted_bytes;
    step.stats.fetched_bytes = after.fetched_bytes - before.fetched_bytes;
    step.stats.fetched_on_demand = after.fetched_on_demand - before.fetched_on_demand;
    step.stats.prefetch_hits = after.prefetch_hits - before.prefetch_hits;
    return step;
  }
};

// Calls cost the host nothing, so that only the link determines the time.
EmulatedOptions QuickHost() {
  EmulatedOptions options = MachineOptions();
  options.preset.host_call_us = 0;
  options.preset.host_event_us = 0;
  return options;
}

// Trains a net.
class Training : public TargetWorld {
 public:
  explicit Training(uint64_t target_bytes, const EmulatedOptions& machine = MachineOptions())
      : TargetWorld(target_bytes, machine) {}

  using TargetWorld::Run;
  Step Run() { return Run(net); }

  const TestNet net{device(), at::kFloat, kShape};
};

// Runs a step without offload.
TargetWorld::Step Plain(const NetShape& shape = kShape,
                        const EmulatedOptions& machine = MachineOptions()) {
  TargetWorld world(OffloadOptions::kAutoTarget, machine);
  const TestNet net(world.device(), at::kFloat, shape);
  return world.Run(net, /*offload=*/false);
}

TEST(OffloadTarget, NoStepHasMoreOnTheDeviceAndAllAreExact) {
  const TargetWorld::Step plain = Plain();
  for (const int percent : {95, 85, 75, 65, 55, 45}) {
    SCOPED_TRACE(percent);
    const uint64_t target_bytes = plain.peak_bytes * percent / 100;
    Training world(target_bytes);
    world.Limit(target_bytes);
    const TargetWorld::Step first = world.Run();
    ExpectSameGradients(plain.gradients, first.gradients);
    ASSERT_EQ(first.stats.kept_as_planned, 0u);
    ASSERT_GT(first.stats.offloaded, 50u);
    ASSERT_GT(first.stats.fetched_on_demand, 50u) << "nothing is fetched ahead into unknown room";
    for (int i = 0; i < 3; ++i) {
      const TargetWorld::Step step = world.Run();
      ExpectSameGradients(plain.gradients, step.gradients);
      EXPECT_LE(step.peak_bytes, target_bytes);
      EXPECT_GT(step.peak_bytes, target_bytes * 19 / 20) << "there was room to keep more";
      ASSERT_GT(step.stats.offloaded, 0u);
      ASSERT_GT(step.stats.evicted_bytes, 0u);
      ASSERT_GT(step.stats.prefetch_hits, 0u);
      EXPECT_EQ(step.stats.fetched_on_demand, 0u);
      EXPECT_EQ(step.stats.evicted_bytes, step.stats.fetched_bytes);
    }
    world.ExpectNothingLeft();
  }
}

// For example a forward whose loss is not finite.
TEST(OffloadTarget, AForwardWithoutBackwardIsNotPlanned) {
  Training world(Plain().peak_bytes * 3 / 4);
  for (int i = 0; i < 2; ++i) {
    const OffloadScope scope(world.session());
    world.net.Loss();
  }
  EXPECT_THAT(world.session()->PlannedSteps(0), SizeIs(0));
  world.Run();
  world.Run();
  EXPECT_THAT(world.session()->PlannedSteps(0), SizeIs(1));
}

TEST(OffloadTarget, WhatNeedNotLeaveIsNotCopied) {
  const TargetWorld::Step plain = Plain();
  Training world(plain.peak_bytes * 3 / 4);
  const TargetWorld::Step first = world.Run();
  const TargetWorld::Step step = world.Run();
  EXPECT_EQ(step.stats.offloaded + step.stats.kept_as_planned, first.stats.offloaded);
  EXPECT_GT(step.stats.kept_as_planned, step.stats.offloaded);
  // Evicted bytes lower the peak, except tensors that move while the peak is elsewhere.
  EXPECT_LT(step.stats.evicted_bytes, (plain.peak_bytes - step.peak_bytes) * 4 / 3);
}

// DeepSpeed and torchtitan move tensors that would fit (DeepSpeed#8255, torchtitan#3881).
TEST(OffloadTarget, WhereAllFitsNothingIsCopied) {
  const TargetWorld::Step plain = Plain();
  Training world(2 * plain.peak_bytes);
  world.Run();
  world.Run();
  const TargetWorld::Step step = world.Run();
  EXPECT_GT(step.stats.kept_as_planned, 50u);
  EXPECT_EQ(step.stats.offloaded, 0u);
  EXPECT_EQ(step.peak_bytes, plain.peak_bytes);
}

// TransformerEngine keeps buffers for the next step, and raises an error if a shape changes.
TEST(OffloadTarget, StepsOfTwoShapesAreBothKnownAndKeepWithinTheTarget) {
  const TargetWorld::Step plain = Plain();
  const TargetWorld::Step plain_longer = Plain(Longer());
  const uint64_t target_bytes = plain_longer.peak_bytes * 6 / 10;
  Training world(target_bytes);
  const TestNet longer(world.device(), at::kFloat, Longer());
  world.Limit(target_bytes);
  for (int i = 0; i < 8; ++i) {
    SCOPED_TRACE(i);
    const bool is_longer = i % 2 == 1;
    const TargetWorld::Step step = world.Run(is_longer ? longer : world.net);
    ExpectSameGradients(is_longer ? plain_longer.gradients : plain.gradients, step.gradients);
    // A shape is recorded at its first occurrence, or its second if mistaken for the other.
    if (i < 4) continue;
    EXPECT_EQ(step.stats.fetched_on_demand, 0u);
    EXPECT_GT(step.stats.kept_as_planned, 0u);
  }
}

TEST(OffloadTarget, ATargetThatCannotBeMetTakesTheLeastThereIs) {
  const TargetWorld::Step plain = Plain();
  uint64_t least_bytes = 0;
  for (const int percent : {30, 10}) {
    Training world(plain.peak_bytes * percent / 100);
    for (int i = 0; i < 3; ++i) {
      const TargetWorld::Step step = world.Run();
      ExpectSameGradients(plain.gradients, step.gradients);
      EXPECT_EQ(step.stats.kept_as_planned, 0u);
      if (least_bytes == 0) least_bytes = step.peak_bytes;
      EXPECT_EQ(step.peak_bytes, least_bytes);
    }
  }
  EXPECT_LT(least_bytes, plain.peak_bytes / 2);
}

TEST(OffloadTarget, AsLittleAsNeededCostsNoTimeThatCounts) {
  const TargetWorld::Step plain = Plain(kShape, QuickHost());
  Training world(OffloadOptions::kAutoTarget, QuickHost());
  for (int i = 0; i < 4; ++i) world.Run();  // the first pins host memory, three are recorded
  const TargetWorld::Step step = world.Run();
  ExpectSameGradients(plain.gradients, step.gradients);
  EXPECT_LE(step.ms, plain.ms * 1.01);
  EXPECT_LT(step.peak_bytes, plain.peak_bytes * 9 / 10);
  EXPECT_GT(step.stats.evicted_bytes, 0u);
}

TEST(OffloadTarget, AGraphThatIsKeptIsReadAgainAndAgain) {
  const TargetWorld::Step plain = Plain();
  const uint64_t target_bytes = plain.peak_bytes * 6 / 10;
  Training world(target_bytes);
  for (int i = 0; i < 4; ++i) {
    SeedGenerators();
    const at::Tensor loss = InScope(world.session(), [&] { return world.net.Loss(); });
    for (int backward = 0; backward < 3; ++backward) {
      loss.backward({}, /*retain_graph=*/true);
      ExpectSameGradients(plain.gradients, TakeGradients(world.net, loss));
    }
  }
}

// A step ends when its last tensor is released: here after two forwards and two backwards.
TEST(OffloadTarget, TwoForwardsInFlightAreOneStep) {
  const TargetWorld::Step plain = Plain();
  Training world(plain.peak_bytes);
  uint64_t kept = 0;
  for (int i = 0; i < 4; ++i) {
    SCOPED_TRACE(i);
    SeedGenerators();
    std::vector<at::Tensor> losses;
    for (int forward = 0; forward < 2; ++forward) {
      SeedGenerators();
      const OffloadScope scope(world.session());
      losses.push_back(world.net.Loss());
    }
    if (i > 0) world.Limit(plain.peak_bytes);
    for (const at::Tensor& loss : losses) {
      loss.backward();
      ExpectSameGradients(plain.gradients, TakeGradients(world.net, loss));
    }
    kept = world.QuietStats().kept_as_planned;
  }
  EXPECT_GT(kept, 0u);
}

// Layers are left out at random, so most steps differ from the expected plan.
TEST(OffloadTarget, BranchesThatAreTakenAtRandomKeepWithinTheTarget) {
  const TargetWorld::Step plain = Plain();
  const uint64_t target_bytes = plain.peak_bytes * 6 / 10;
  std::vector<NetShape> shapes;
  std::mt19937 random(1);
  for (int i = 0; i < 12; ++i) {
    NetShape shape = kShape;
    shape.layers = 1 + static_cast<int64_t>(random() % 6);
    shape.tokens = 32 + 16 * static_cast<int64_t>(random() % 3);
    shapes.push_back(shape);
  }
  std::vector<Gradients> expected;
  for (const NetShape& shape : shapes) expected.push_back(Plain(shape).gradients);
  TargetWorld world(target_bytes);
  world.Limit(target_bytes);
  for (int round = 0; round < 3; ++round) {
    for (size_t i = 0; i < shapes.size(); ++i) {
      SCOPED_TRACE(::testing::Message() << "round " << round << ", net " << i);
      const TestNet net(world.device(), at::kFloat, shapes[i]);
      ExpectSameGradients(expected[i], world.Run(net).gradients);
    }
  }
  EXPECT_GT(world.QuietStats().kept_as_planned, 0u);
}

TEST(OffloadTarget, ManyStepsLeaveNothingBehind) {
  const TargetWorld::Step plain = Plain();
  Training world(plain.peak_bytes * 6 / 10);
  for (int i = 0; i < 3; ++i) world.Run();
  const uint64_t device_bytes = world.device_bytes();
  const uint64_t booked_bytes = world.session()->GetAllocatorStats().booked_bytes.current;
  for (int i = 0; i < 100; ++i) world.Run();
  EXPECT_EQ(world.device_bytes(), device_bytes);
  EXPECT_EQ(world.session()->GetAllocatorStats().booked_bytes.current, booked_bytes);
  world.ExpectNothingLeft();
}

TEST(OffloadTarget, ThePlanIsExplained) {
  const TargetWorld::Step plain = Plain();
  Training world(plain.peak_bytes * 3 / 4);
  EXPECT_EQ(world.session()->Explain(0), "");
  world.Run();
  EXPECT_EQ(world.session()->Explain(0), "") << "the record is read when the next step begins";
  const TargetWorld::Step step = world.Run();
  EXPECT_THAT(world.session()->Explain(0),
              AllOf(HasSubstr("x the compute alone"),
                    HasSubstr(absl::StrCat(step.stats.offloaded, " of ")), HasSubstr("gone")));
}

TEST(OffloadTarget, AShortfallIsExplained) {
  const TargetWorld::Step plain = Plain();
  Training world(plain.peak_bytes / 10);
  for (int i = 0; i < 2; ++i) world.Run();
  EXPECT_THAT(world.session()->Explain(0), HasSubstr("not run as planned: the step does not"));
}

// Returns each number after "the least is", in the explanation or the log of a target that cannot
// be met.
std::vector<uint64_t> LeastBytesToldBy(const std::string& text) {
  const std::string before = "the least is ";
  std::vector<uint64_t> told;
  for (size_t at = text.find(before); at != std::string::npos; at = text.find(before, at + 1)) {
    told.push_back(std::stoull(text.substr(at + before.size())));
  }
  return told;
}

int Count(const std::string& text, const std::string& part) {
  int count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(OffloadTarget, ATargetThatCannotBeMetIsToldOfOnceWithTheLeastAndWithWhatAStepHad) {
  const CapturedLog log;
  Training world(1);
  for (int i = 0; i < 5; ++i) world.Run();
  EXPECT_EQ(Count(log.text(), "cannot be met on emu:0"), 1) << log.text();
  EXPECT_THAT(LeastBytesToldBy(log.text()),
              AllOf(SizeIs(1), Eq(LeastBytesToldBy(world.session()->Explain(0)))));
  const std::string more = "more on the device than memory_target_bytes allows (1 B)";
  EXPECT_EQ(Count(log.text(), more), 1) << log.text();
}

TEST(OffloadTarget, AFirstStepThatDiesOfItsTargetTellsItAndWhatTheDeviceHad) {
  const uint64_t least_bytes = Training(1).Run().peak_bytes;
  int in_forward = 0, in_backward = 0;
  for (const uint64_t percent : {50, 70, 90, 99}) {
    SCOPED_TRACE(percent);
    const uint64_t limit_bytes = least_bytes * percent / 100;
    const CapturedLog log;
    Training world(limit_bytes);
    world.Limit(limit_bytes);
    EXPECT_THROW(world.Run(), c10::OutOfMemoryError);
    ++(world.QuietStats().unpacked > 0 ? in_backward : in_forward);
    EXPECT_EQ(Count(log.text(), "memory ran out on emu:0"), 1) << log.text();
    EXPECT_THAT(log.text(), AllOf(HasSubstr(absl::StrCat("memory_target_bytes is ", limit_bytes)),
                                  HasSubstr(absl::StrCat("up to ", world.peak_device_bytes()))));
  }
  EXPECT_GT(in_forward, 0);
  EXPECT_GT(in_backward, 0);
}

// The program may react by itself, for example with a smaller batch.
TEST(OffloadTarget, MemoryThatRunsOutInAStepBeforeWhichOneWasKnownIsNotExplained) {
  const CapturedLog log;
  Training world(1 << 30);
  for (int i = 0; i < 3; ++i) world.Run();
  world.Limit(world.device_bytes() + 1);
  EXPECT_THROW(world.Run(), c10::OutOfMemoryError);
  EXPECT_EQ(Count(log.text(), "memory ran out"), 0) << log.text();
}

// For example an optimizer's state, which exists from the first step on.
TEST(OffloadTarget, ALeastThatGrowsIsToldAgain) {
  const CapturedLog log;
  Training world(1);
  for (int i = 0; i < 3; ++i) world.Run();
  const at::Tensor kept = at::empty({1 << 20}, at::TensorOptions(world.device()).dtype(at::kByte));
  for (int i = 0; i < 3; ++i) world.Run();
  EXPECT_EQ(Count(log.text(), "cannot be met on emu:0"), 2) << log.text();
  const std::vector<uint64_t> least_bytes = LeastBytesToldBy(log.text());
  ASSERT_THAT(least_bytes, SizeIs(2));
  EXPECT_GE(least_bytes[1], least_bytes[0] + kept.nbytes());
}

TEST(OffloadTarget, ATargetThatIsMetIsNotSpokenOf) {
  const TargetWorld::Step plain = Plain();
  const CapturedLog log;
  Training world(plain.peak_bytes * 3 / 4);
  for (int i = 0; i < 5; ++i) world.Run();
  EXPECT_EQ(log.text(), "");
}

TEST(OffloadTarget, TheLeastThatIsToldIsWhatAllLeavingTakesAndIsEnoughForAPlan) {
  const TargetWorld::Step plain = Plain();
  uint64_t least_bytes = 0;
  {
    Training world(1);
    const TargetWorld::Step all_leaves = world.Run();
    world.Run();
    const std::vector<uint64_t> told = LeastBytesToldBy(world.session()->Explain(0));
    ASSERT_THAT(told, SizeIs(1));
    least_bytes = told[0];
    EXPECT_LE(least_bytes, all_leaves.peak_bytes);
  }
  Training world(least_bytes);
  world.Run();
  world.Limit(least_bytes);
  // Steps that are recorded while they run as planned need no more than the first one.
  for (int i = 0; i < 4; ++i) {
    const TargetWorld::Step step = world.Run();
    ExpectSameGradients(plain.gradients, step.gradients);
    EXPECT_GT(step.stats.kept_as_planned, 0u) << i;
  }
}

TEST(OffloadTarget, WhatCannotWorkTogetherIsRefusedByName) {
  OffloadOptions options = WithTarget(1 << 20);
  options.overlap = false;
  EXPECT_THAT(options.Validate(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("overlap")));
  options = WithTarget(1 << 20);
  options.eviction_window_bytes = 1 << 20;
  EXPECT_THAT(options.Validate(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("eviction_window_bytes")));
  options = WithTarget(1 << 20);
  options.link->d2h_duplex_gb_per_s = 0;
  EXPECT_THAT(options.Validate(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("d2h_duplex_gb_per_s")));
  EXPECT_THAT(WithTarget(1 << 20).Validate(), IsOk());
}

}  // namespace offload_target_test
}  // namespace pinion::testing
