#include <cstdint>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/planner/liveness.h"
#include "pinion/engine/planner/step_plan.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/tests/engine/planner/small_steps.h"

namespace pinion::testing {
namespace device_bytes_test {

using ::testing::ElementsAre;

// Two objects of 10 bytes: uses 0 1 | 1 0.
StepTrace TwoObjects() { return ForwardAndBackward(/*size_bytes=*/10, {1, 2}); }

TEST(DeviceBytesTest, AnObjectIsResidentFromTheIntervalThatMakesItUntilTheOneBehindItsLastAccess) {
  EXPECT_THAT(DeviceBytes(TwoObjects(), {}), ElementsAre(10, 20, 20, 20, 10));
}

TEST(DeviceBytesTest, OtherBytesCountWithTheirPeaks) {
  StepTrace step = TwoObjects();
  step.intervals[1] = {.other_bytes = 5, .transient_bytes = 3};
  EXPECT_THAT(DeviceBytes(step, {}), ElementsAre(10, 28, 20, 20, 10));
}

TEST(DeviceBytesTest, WhatIsFreedBeforeTheIntervalsPeakDoesNotCountTwice) {
  StepTrace step = TwoObjects();
  step.intervals[3] = {.other_bytes = 2, .transient_bytes = 10, .released_bytes = 10};
  EXPECT_THAT(DeviceBytes(step, {}), ElementsAre(10, 20, 20, 22, 10));
}

TEST(DeviceBytesTest, AnOffloadedObjectDoesNotCountFromBehindItsEvictionUntilItsFetch) {
  const std::vector<StepMove> moves = {{.object = 0, .evict_at = 1, .fetch_at = 3, .read_at = 3}};
  EXPECT_THAT(DeviceBytes(TwoObjects(), moves), ElementsAre(10, 20, 10, 10, 10));
}

TEST(DeviceBytesTest, WhatIsNeverFetchedIsOffloadedAsLongAsItWouldBeResident) {
  StepTrace step = TwoObjects();
  step.objects[1].needed_until = 4;
  const std::vector<StepMove> moves = {
      {.object = 1, .evict_at = 3, .fetch_at = StepMove::kNever, .read_at = StepMove::kNever}};
  EXPECT_THAT(DeviceBytes(step, {}), ElementsAre(10, 20, 20, 20, 20));
  EXPECT_THAT(DeviceBytes(step, moves), ElementsAre(10, 20, 20, 20, 10));
}

TEST(DeviceBytesTest, WhatFreesNothingIsAmongTheOtherBytes) {
  StepTrace step = TwoObjects();
  step.objects[0].frees = false;
  EXPECT_THAT(DeviceBytes(step, {}), ElementsAre(0, 10, 10, 10, 0));
}

TEST(DeviceBytesTest, WhatOneOperatorUsesIsResidentUntilTheNextOneBegins) {
  StepTrace step = TwoObjects();
  step.operators = {0, 0, 1, 1};
  EXPECT_THAT(DeviceBytes(step, {}), ElementsAre(10, 20, 20, 20, 20));
}

}  // namespace device_bytes_test
}  // namespace pinion::testing
