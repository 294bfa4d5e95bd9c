#include "pinion/programs/step_bound.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace step_bound_test {

using ::testing::HasSubstr;

// 1 GB/s is 1 KB per microsecond.
constexpr uint64_t kKb = 1000;

// The directions do not slow each other down.
LinkCalibration Link(double out_kb_per_us, double in_kb_per_us) {
  LinkCalibration link;
  link.d2h.gb_per_s = link.d2h_duplex_gb_per_s = out_kb_per_us;
  link.h2d.gb_per_s = link.h2d_duplex_gb_per_s = in_kb_per_us;
  return link;
}

double BoundUs(const StepTrace& step, uint64_t memory_kb, const LinkCalibration& link) {
  const absl::StatusOr<double> bound_us = StepLowerBoundUs(step, memory_kb * kKb, link);
  EXPECT_THAT(bound_us, IsOk());
  return bound_us.value_or(-1);
}

void Use(StepTrace& step, uint32_t object, double compute_us) {
  if (object == step.objects.size()) step.objects.emplace_back();
  step.accesses.push_back(object);
  StepInterval interval;
  interval.compute_us = compute_us;
  step.intervals.push_back(interval);
}

// A use of object 0, which frees nothing, follows at once: the operator that saves `object` has
// returned by then, so that it can leave.
void Save(StepTrace& step, uint32_t object, double compute_us) {
  if (step.objects.empty()) {
    Use(step, 0, 0);
    step.objects[0] = {.size_bytes = 1, .frees = false};
  }
  Use(step, object, compute_us);
  Use(step, 0, 0);
}

// Four layers, objects 1 to 4, that each compute 1 us forward, in intervals 1, 3, 5 and 7, and 2 us
// backward and save 10 KB.
StepTrace FourLayers() {
  StepTrace step;
  for (uint32_t layer = 1; layer <= 4; ++layer) Save(step, layer, 1);
  Use(step, 4, 0);
  for (uint32_t layer = 3; layer > 0; --layer) Use(step, layer, 2);
  step.intervals.push_back({.compute_us = 2});
  for (StepObject& object : step.objects) object.size_bytes = 10 * kKb;
  return step;
}

StepTrace RandomChain(std::mt19937& random) {
  StepTrace step;
  std::uniform_real_distribution<double> compute_us(0.1, 2);
  std::uniform_int_distribution<uint64_t> size_kb(1, 100);
  constexpr uint32_t kLayers = 30;
  for (uint32_t i = 1; i <= kLayers; ++i) Save(step, i, compute_us(random));
  for (uint32_t i = kLayers; i > 0; --i) Use(step, i, 2 * compute_us(random));
  step.intervals.push_back({.compute_us = compute_us(random)});
  for (StepObject& object : step.objects) object.size_bytes = size_kb(random) * kKb;
  return step;
}

// --- One forward and its backward ---

TEST(StepBoundTest, IsTheComputeWhenEverythingFits) {
  EXPECT_DOUBLE_EQ(BoundUs(FourLayers(), 40, Link(1, 1)), 12.0);
  EXPECT_DOUBLE_EQ(StepLowerBoundUs(FourLayers(), UINT64_MAX, Link(1, 1)).value(), 12.0);
}

TEST(StepBoundTest, IsTheComputeWhenTheLinkKeepsUp) {
  // 10 KB are copied out within each layer's microsecond, so at most two tensors are resident.
  EXPECT_DOUBLE_EQ(BoundUs(FourLayers(), 20, Link(10, 5)), 12.0);
}

TEST(StepBoundTest, CountsTheWaitForRoomInEachDirection) {
  // Forward copies 5 KB/us out and has 20 KB: the third layer finds 15 KB in use and waits 1 us for
  // 5 KB. The fourth layer waits 1 us too. Backward, at 2.5 KB/us, falls behind by 5 KB per layer
  // and waits twice for 2 us.
  EXPECT_DOUBLE_EQ(BoundUs(FourLayers(), 20, Link(5, 2.5)), 12.0 + 2 * 1.0 + 2 * 2.0);
}

TEST(StepBoundTest, OtherLiveBytesTakeTheirRoom) {
  StepTrace step = FourLayers();
  for (StepInterval& interval : step.intervals) interval.other_bytes = 7 * kKb;
  EXPECT_DOUBLE_EQ(BoundUs(step, 27, Link(5, 2.5)), BoundUs(FourLayers(), 20, Link(5, 2.5)));
}

TEST(StepBoundTest, OtherLiveBytesOfOneIntervalCountThereAlone) {
  // Beside the third layer there is room for neither of the first two. Both leave from 1 us on,
  // which takes 4; the third layer could have begun at 2. The fourth then has room for what is
  // left.
  StepTrace step = FourLayers();
  step.intervals[5].other_bytes = 5 * kKb;
  EXPECT_DOUBLE_EQ(BoundUs(step, 20, Link(5, 2.5)), 12.0 + 3.0 + 2 * 2.0);
  // Beside the fourth there is room for none: 30 KB leave in 6 us from 1 us on instead of in 2, and
  // come back in 12 beside 6 of backward.
  step.intervals[5].other_bytes = 0;
  step.intervals[7].other_bytes = 5 * kKb;
  EXPECT_DOUBLE_EQ(BoundUs(step, 20, Link(5, 2.5)), 12.0 + 4.0 + 6.0);
}

// --- Whole objects ---

// Three objects of 10, 10 and 4 KB are made, 1 us each; the fourth layer makes none and has other
// bytes. Nothing is read.
StepTrace ThreeObjects(uint64_t other_kb) {
  StepTrace step;
  for (const uint32_t object : {1u, 2u, 3u}) Save(step, object, 1);
  step.intervals.push_back({.compute_us = 1, .other_bytes = other_kb * kKb});
  step.objects[1].size_bytes = step.objects[2].size_bytes = 10 * kKb;
  step.objects[3].size_bytes = 4 * kKb;
  return step;
}

TEST(StepBoundTest, AnObjectThatDoesNotFitAsAWholeLeavesAsAWhole) {
  // 13 KB hold one object of 10 KB, so 14 KB are copied out from 1 us on. 14 KB hold one object of
  // each size, and the copy of the other one is hidden.
  EXPECT_DOUBLE_EQ(BoundUs(ThreeObjects(11), 24, Link(5, 1)), 4.0 + (14.0 / 5.0 - 2.0));
  EXPECT_DOUBLE_EQ(BoundUs(ThreeObjects(10), 24, Link(5, 1)), 4.0);
}

TEST(StepBoundTest, WhatIsMadeLastAndDoesNotFitHasItsOwnCopyToWaitFor) {
  // 3 KB hold no object. The last one, of 4 KB, is copied from 3 us on.
  EXPECT_DOUBLE_EQ(BoundUs(ThreeObjects(21), 24, Link(20, 1)), 4.0 + 4.0 / 20.0);
}

TEST(StepBoundTest, ManyEqualSizesAreWholeObjectsToo) {
  // Room for 15 KB holds one of the hundred objects of 10.
  StepTrace step;
  for (uint32_t object = 1; object <= 100; ++object) Save(step, object, 0);
  step.intervals.push_back({.compute_us = 1, .other_bytes = 985 * kKb});
  for (uint32_t object = 1; object <= 100; ++object) step.objects[object].size_bytes = 10 * kKb;
  EXPECT_DOUBLE_EQ(BoundUs(step, 1000, Link(1, 1)), 1.0 + 990.0);
}

TEST(StepBoundTest, ManyDifferentSizesCountAsIfTheyCouldBeCut) {
  // Each power of two from 2 on is a size: whole objects would leave an odd byte of the room free,
  // but there are more sums than are looked at.
  StepTrace step;
  for (uint32_t object = 1; object <= 10; ++object) Save(step, object, 0);
  step.intervals.push_back({.compute_us = 1, .other_bytes = 501});
  for (uint32_t object = 1; object <= 10; ++object) step.objects[object].size_bytes = 1u << object;
  EXPECT_DOUBLE_EQ(StepLowerBoundUs(step, 2046, Link(1, 1)).value(), 1.0 + 0.501);
}

TEST(StepBoundTest, WhatAnOperatorSavesLeavesWhenItHasReturned) {
  // The object is made by the operator of the first two uses, which has returned at the third, 2 us
  // later. Other bytes need its room behind that one.
  StepTrace step;
  Use(step, 0, 1);
  Use(step, 1, 0);
  Use(step, 1, 2);
  step.operators = {0, 0, 1};
  step.intervals.push_back({.compute_us = 1, .other_bytes = 10 * kKb});
  step.objects[0].size_bytes = 10 * kKb;
  step.objects[1] = {.size_bytes = 1, .frees = false};
  EXPECT_DOUBLE_EQ(BoundUs(step, 10, Link(5, 1)), 4.0 + 2.0);
}

TEST(StepBoundTest, TemporariesOfBackwardHaveToFindRoomAsWell) {
  // The first interval of backward needs the memory of the 10 KB that it does not read. Of these
  // 8 KB leave during the 2 us behind them, and 2 KB take half a microsecond more. All 10 KB come
  // back in 2 us, which nothing hides.
  StepTrace step;
  Save(step, 1, 1);
  Save(step, 2, 2);
  Use(step, 2, 0);
  Use(step, 1, 1);
  step.intervals.push_back({.compute_us = 5});
  step.objects[1].size_bytes = 10 * kKb;
  step.objects[2].size_bytes = 10 * kKb;
  step.intervals[6].other_bytes = 20 * kKb;
  EXPECT_DOUBLE_EQ(BoundUs(step, 40, Link(1, 5)), 9.0);
  EXPECT_DOUBLE_EQ(BoundUs(step, 30, Link(4, 5)), 9.0 + 0.5 + 2.0);
}

TEST(StepBoundTest, TransientBytesTakeTheRoomOfTheirInterval) {
  StepTrace step = FourLayers();
  for (StepInterval& interval : step.intervals) {
    interval.other_bytes = 3 * kKb;
    interval.transient_bytes = 4 * kKb;
  }
  EXPECT_DOUBLE_EQ(BoundUs(step, 27, Link(5, 2.5)), BoundUs(FourLayers(), 20, Link(5, 2.5)));
}

TEST(StepBoundTest, IsInfiniteWhereTransientBytesAloneNeedMore) {
  StepTrace step = FourLayers();
  step.intervals.back().other_bytes = 1 * kKb;
  step.intervals.back().transient_bytes = 10 * kKb;
  EXPECT_TRUE(std::isinf(BoundUs(step, 20, Link(1, 1))));
  EXPECT_FALSE(std::isinf(BoundUs(step, 21, Link(1, 1))));
}

TEST(StepBoundTest, IsInfiniteWhenOneIntervalAloneNeedsMore) {
  EXPECT_TRUE(std::isinf(BoundUs(FourLayers(), 9, Link(1, 1))));
  EXPECT_FALSE(std::isinf(BoundUs(FourLayers(), 10, Link(1, 1))));
  StepTrace step = FourLayers();
  step.intervals.back().other_bytes = 11 * kKb;
  EXPECT_TRUE(std::isinf(BoundUs(step, 20, Link(1, 1))));
  EXPECT_FALSE(std::isinf(BoundUs(step, 21, Link(1, 1))));
}

TEST(StepBoundTest, WhatDroppingDoesNotFreeNeverMoves) {
  StepTrace step = FourLayers();
  for (StepObject& object : step.objects) object.frees = false;
  EXPECT_DOUBLE_EQ(BoundUs(step, 0, Link(1, 1)), 12.0);
}

TEST(StepBoundTest, WhatIsNeverReadLeavesAndDoesNotComeBack) {
  // 10 KB that nobody reads make room for 10 KB of others, at 5 KB/us and beside 1 us of compute.
  StepTrace step;
  Save(step, 1, 1);
  Save(step, 2, 1);
  step.intervals.push_back({.compute_us = 1, .other_bytes = 15 * kKb});
  step.objects[1].size_bytes = 10 * kKb;
  step.objects[2].size_bytes = 1 * kKb;
  EXPECT_DOUBLE_EQ(BoundUs(step, 15, Link(5, 1e-3)), 3.0 + (11.0 - 5.0) / 5.0);
  // Nothing is offloaded if the program frees the objects before.
  step.objects[1].needed_until = step.objects[2].needed_until = 4;
  EXPECT_DOUBLE_EQ(BoundUs(step, 15, Link(5, 1e-3)), 3.0);
  // A longer reference by the program counts among the other bytes.
  step.objects[1].held_until = 5;
  EXPECT_DOUBLE_EQ(BoundUs(step, 15, Link(5, 1e-3)), 3.0);
}

TEST(StepBoundTest, NeverRisesWithMoreMemoryOrAFasterLink) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const StepTrace step = RandomChain(random);
    double previous = std::numeric_limits<double>::infinity();
    for (uint64_t memory_kb = 100; memory_kb <= 3000; memory_kb += 100) {
      const double bound = BoundUs(step, memory_kb, Link(20, 30));
      EXPECT_LE(bound, previous + 1e-9);
      EXPECT_GE(bound, step.compute_us() - 1e-9);
      EXPECT_LE(BoundUs(step, memory_kb, Link(40, 60)), bound + 1e-9);
      previous = bound;
    }
    EXPECT_NEAR(previous, step.compute_us(), 1e-9);
  }
}

TEST(StepBoundTest, IsAtLeastTheTrafficThatCannotStay) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const StepTrace step = RandomChain(random);
    double saved_kb = 0;
    for (const StepObject& object : step.objects) {
      if (object.frees) saved_kb += static_cast<double>(object.size_bytes) / 1e3;
    }
    EXPECT_GE(BoundUs(step, 200, Link(5, 5)), 2 * (saved_kb - 200) / 5 - 1e-9);
  }
}

// --- Both directions ---

// Twice a tensor of 10 KB is saved, has to make room for 20 KB of other bytes, and is read; nothing
// is computed. Objects that free nothing keep the two apart.
StepTrace OneAfterTheOther() {
  StepTrace step;
  for (const uint32_t first : {0u, 3u}) {
    Use(step, first, 0);
    Use(step, first + 1, 0);
    Use(step, first + 1, 0);
    step.intervals.back().other_bytes = 20 * kKb;
    Use(step, first, 0);
    Use(step, first + 2, 0);
  }
  step.intervals.emplace_back();
  for (uint32_t i = 0; i < step.objects.size(); ++i) {
    step.objects[i].size_bytes = 10 * kKb;
    step.objects[i].frees = i % 3 == 0;
  }
  return step;
}

TEST(StepBoundTest, WhatHasLeftAndIsOverMakesNoRoomForOthers) {
  // Each copy out takes 10 us. One of the two copies in comes after both copies out.
  EXPECT_DOUBLE_EQ(BoundUs(OneAfterTheOther(), 20, Link(1, 1)), 20.0 + 10.0);
}

TEST(StepBoundTest, WhatMovesTwiceTakesTheLinkTwice) {
  LinkCalibration link = Link(1, 1);
  link.d2h_duplex_gb_per_s = link.h2d_duplex_gb_per_s = 0.5;
  EXPECT_DOUBLE_EQ(BoundUs(OneAfterTheOther(), 20, link), 40.0);
}

// --- Errors ---

TEST(StepBoundTest, RefusesARecordThatIsNotValid) {
  StepTrace step = FourLayers();
  step.objects[2].size_bytes = 0;
  EXPECT_THAT(StepLowerBoundUs(step, 1, Link(1, 1)),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("object 2")));
}

TEST(StepBoundTest, RefusesALinkThatWasNotMeasured) {
  const auto refused = [](const LinkCalibration& link, const std::string& text) {
    EXPECT_THAT(StepLowerBoundUs(FourLayers(), 40 * kKb, link),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(text)));
  };
  refused(Link(0, 1), "d2h.gb_per_s is 0 GB/s: measure it");
  refused(Link(1, 0), "h2d.gb_per_s is 0 GB/s: measure it");
  LinkCalibration link = Link(1, 1);
  link.d2h_duplex_gb_per_s = 0;
  refused(link, "d2h_duplex_gb_per_s is 0 GB/s");
  link = Link(1, 1);
  link.h2d_duplex_gb_per_s = -1;
  refused(link, "h2d_duplex_gb_per_s is -1 GB/s");
}

}  // namespace step_bound_test
}  // namespace pinion::testing
