#include "pinion/engine/plan/step_bound.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace pinion {
namespace {

// Four layers that each compute 1 ms forward and 2 ms backward and save 10 bytes.
StepTrace FourLayers() {
  StepTrace trace;
  trace.forward.assign(4, {1.0, 10});
  trace.backward.assign(4, {2.0, 10});
  return trace;
}

StepTrace RandomTrace(std::mt19937& random) {
  StepTrace trace;
  std::uniform_real_distribution<double> compute_ms(0.1, 2);
  std::uniform_int_distribution<uint64_t> saved_bytes(0, 100);
  for (int i = 0; i < 30; ++i) trace.forward.push_back({compute_ms(random), saved_bytes(random)});
  for (auto op = trace.forward.rbegin(); op != trace.forward.rend(); ++op) {
    trace.backward.push_back({2 * op->compute_ms, op->saved_bytes});
  }
  return trace;
}

TEST(StepBoundTest, IsTheComputeWhenEverythingFits) {
  EXPECT_DOUBLE_EQ(StepLowerBoundMs(FourLayers(), 40, {1, 1}), 12.0);
}

TEST(StepBoundTest, IsTheComputeWhenTheLinkKeepsUp) {
  // 10 bytes leave within each layer's millisecond; two tensors are on the device at most.
  EXPECT_DOUBLE_EQ(StepLowerBoundMs(FourLayers(), 20, {10, 5}), 12.0);
}

TEST(StepBoundTest, CountsTheWaitForRoomInEachDirection) {
  // Forward at 5 bytes/ms with room for 20: the third layer finds 15 live bytes and waits 1 ms for
  // 5 of them; it then leaves 5 + 10, so the fourth waits 1 ms as well. Backward at 2.5 bytes/ms
  // loses 5 bytes a layer too, and so waits for 5 bytes twice: 2 ms each.
  EXPECT_DOUBLE_EQ(StepLowerBoundMs(FourLayers(), 20, {5, 2.5}), 12.0 + 2 * 1.0 + 2 * 2.0);
}

TEST(StepBoundTest, IsInfiniteWhenOneOperatorSavesMoreThanThereIs) {
  EXPECT_TRUE(std::isinf(StepLowerBoundMs(FourLayers(), 9, {1, 1})));
}

TEST(StepBoundTest, AnOperatorMaySaveAsMuchAsThereIsWithoutAWait) {
  StepTrace trace;
  trace.forward = {{1.0, 10}};
  trace.backward = {{2.0, 10}};
  EXPECT_DOUBLE_EQ(StepLowerBoundMs(trace, 10, {1, 1}), 3.0);
}

TEST(StepBoundTest, NeverRisesWithMoreMemoryOrAFasterLink) {
  for (int seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const StepTrace trace = RandomTrace(random);
    double previous = std::numeric_limits<double>::infinity();
    for (uint64_t memory_bytes = 100; memory_bytes <= 3000; memory_bytes += 100) {
      const double bound = StepLowerBoundMs(trace, memory_bytes, {20, 30});
      EXPECT_LE(bound, previous + 1e-9);
      EXPECT_GE(bound, trace.compute_ms() - 1e-9);
      EXPECT_LE(StepLowerBoundMs(trace, memory_bytes, {40, 60}), bound + 1e-9);
      previous = bound;
    }
    EXPECT_NEAR(previous, trace.compute_ms(), 1e-9);
  }
}

TEST(StepBoundTest, IsAtLeastTheTrafficThatCannotStay) {
  for (int seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const StepTrace trace = RandomTrace(random);
    double saved_bytes = 0;
    for (const TraceOperator& op : trace.forward) saved_bytes += op.saved_bytes;
    EXPECT_GE(StepLowerBoundMs(trace, 200, {5, 5}), 2 * (saved_bytes - 200) / 5 - 1e-9);
  }
}

}  // namespace
}  // namespace pinion
