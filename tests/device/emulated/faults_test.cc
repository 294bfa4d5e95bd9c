#include "pinion/device/emulated/faults.h"

#include <limits>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace faults_test {

using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;
using ::testing::HasSubstr;

constexpr double kForever = std::numeric_limits<double>::infinity();

TEST(FaultInjectorTest, TheFirstCallIsTheDefault) {
  FaultInjector injector({.calls = {{.call = DeviceCall::kPin}}}, /*device_count=*/1);
  EXPECT_THAT(injector.Count(0, DeviceCall::kCopy), IsOk());
  EXPECT_THAT(injector.Count(0, DeviceCall::kPin),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("Pin call 1 failed")));
  EXPECT_THAT(injector.Count(0, DeviceCall::kPin), IsOk());
  EXPECT_EQ(injector.calls(DeviceCall::kPin), 2u);
  EXPECT_EQ(injector.calls(DeviceCall::kAny), 3u);
}

TEST(FaultInjectorTest, OfTwoFaultsThatOneCallHitsTheStickyOneCounts) {
  const Fault transient = {DeviceCall::kCopy, 1}, sticky = {DeviceCall::kAny, 1, true};
  const auto outcome = [](const std::vector<Fault>& faults) {
    return FaultInjector({.calls = faults}, 1).Count(0, DeviceCall::kCopy);
  };
  EXPECT_THAT(outcome({transient, sticky}), StatusIs(absl::StatusCode::kInternal));
  EXPECT_THAT(outcome({sticky, transient}), StatusIs(absl::StatusCode::kInternal));
  EXPECT_THAT(outcome({transient, transient}), StatusIs(absl::StatusCode::kUnavailable));
}

TEST(FaultInjectorTest, AStickyFaultStaysWithItsDevice) {
  FaultInjector injector({.calls = {{.call = DeviceCall::kCopy, .at = 1, .sticky = true}}}, 2);
  EXPECT_THAT(injector.Check(1), IsOk());
  EXPECT_FALSE(injector.Count(1, DeviceCall::kCopy).ok());
  EXPECT_THAT(injector.Check(1), StatusIs(absl::StatusCode::kInternal, HasSubstr("emu:1")));
  EXPECT_THAT(injector.Check(0), IsOk());
}

TEST(FaultInjectorTest, ACopyIsStuckForTheLongestOfItsStalls) {
  FaultInjector injector({.calls = {},
                          .stalls = {{.at = 2, .ms = 7}, {.at = 2, .ms = 3}, {.at = 3}, {}},
                          .stall_copies_from = 4,
                          .stall_ms = 5},
                         1);
  for (const double expected_ms : {kForever, 7.0, kForever, 5.0, 5.0}) {
    EXPECT_THAT(injector.Count(0, DeviceCall::kKernel), IsOk());
    EXPECT_THAT(injector.Count(0, DeviceCall::kCopy), IsOk());
    EXPECT_EQ(injector.StallMs(), expected_ms) << injector.calls(DeviceCall::kCopy);
  }
}

TEST(FaultInjectorDeathTest, NoCallIsOfAnyKind) {
  EXPECT_DEATH((void)FaultInjector({}, 1).Count(0, DeviceCall::kAny), "never a call");
}

}  // namespace faults_test
}  // namespace pinion
