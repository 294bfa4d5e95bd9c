// Checks that a thousand steps within a memory target use no more resources than the first steps:
// two alternating shapes, and rarely a new one.

#include <cstddef>
#include <cstdint>
#include <string>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/engine/schedule/planned_schedule.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/footprint.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace offload_many_steps_test {

constexpr int kSteps = 1000;
constexpr int kEarly = 50;
// By this step all shapes have occurred, and the plan cache and LibTorch's caches are full.
constexpr int kFull = 500;

constexpr NetShape kShape = {.layers = 2, .batch = 2, .tokens = 24};
constexpr NetShape kOther = {.layers = 3, .batch = 2, .tokens = 16};

// Smaller than the two shapes, so no peak rises, and too many for the plan cache, so always new.
constexpr int kRareShapes = 40;
static_assert(kRareShapes > PlannedSchedule::kMaxCached);
constexpr int kRareEvery = 10;
NetShape RareShape(int n) {
  return {.layers = 1 + n % 2, .batch = 1 + n / 2 % 2, .tokens = 4 + n / 4};
}

// Allowed heap growth from kFull to the end, because plan sizes differ by shape. A leak of one byte
// per saved tensor would exceed it twice: a step saves some 40 tensors.
constexpr uint64_t kHeapBytes = 64 * kKiB;
static_assert(kHeapBytes < 4 * 40 * (kSteps - kFull));

size_t Count(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

size_t Plans(EmuWorld& world) { return Count(world.session()->Explain(0), "x the compute alone"); }

uint64_t PlainPeakBytes() {
  EmuWorld world;
  const TestNet net(world.device(), at::kFloat, kShape);
  const TestNet other(world.device(), at::kFloat, kOther);
  TrainStep(net, nullptr);
  TrainStep(other, nullptr);
  return world.peak_device_bytes();
}

TEST(OffloadManySteps, AThousandStepsOfOldAndNewShapesHaveWhatFiftyHad) {
  EmuWorld world(MachineOptions(), WithTarget(PlainPeakBytes() * 9 / 10));
  const TestNet net(world.device(), at::kFloat, kShape);
  const TestNet other(world.device(), at::kFloat, kOther);
  Footprint early, full;
  size_t full_plans = 0;
  for (int step = 0; step < kSteps; ++step) {
    if (step == kEarly) early = FootprintOf(world);
    if (step == kFull) {
      full = FootprintOf(world);
      full_plans = Plans(world);
    }
    // Twice in a row, because a step that occurs once is not recorded while the others have plans.
    if (step % kRareEvery < 2) {
      const NetShape rare = RareShape(step / kRareEvery % kRareShapes);
      TrainStep(TestNet(world.device(), at::kFloat, rare), world.session());
    } else {
      TrainStep(step % 2 == 0 ? net : other, world.session());
    }
  }
  const Footprint late = FootprintOf(world);
  EXPECT_GT(world.session()->GetStats().kept_as_planned, uint64_t{10} * kSteps);
  EXPECT_EQ(late.device_bytes, early.device_bytes);
  EXPECT_EQ(late.pinned_bytes, early.pinned_bytes);
  EXPECT_EQ(late.host_bytes, 0u);
  EXPECT_EQ(late.handles, 0u);
  EXPECT_EQ(late.threads, early.threads);
  EXPECT_EQ(late.streams, early.streams);
  EXPECT_EQ(late.events, full.events) << "a rare shape may have more copies under way at once";
  EXPECT_EQ(full_plans, PlannedSchedule::kMaxCached);
  EXPECT_EQ(Plans(world), PlannedSchedule::kMaxCached);
  EXPECT_LT(late.heap_bytes, full.heap_bytes + kHeapBytes);
}

}  // namespace offload_many_steps_test
}  // namespace pinion::testing
