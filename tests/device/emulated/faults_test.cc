#include "pinion/device/emulated/faults.h"

#include <limits>

#include "gtest/gtest.h"

namespace pinion {
namespace {

constexpr double kForever = std::numeric_limits<double>::infinity();

TEST(FaultInjectorTest, TheFirstCallIsTheDefault) {
  FaultInjector injector({.calls = {{.call = DeviceCall::kPin}}});
  EXPECT_FALSE(injector.Count(DeviceCall::kCopy).has_value());
  EXPECT_TRUE(injector.Count(DeviceCall::kPin).has_value());
  EXPECT_FALSE(injector.Count(DeviceCall::kPin).has_value());
  EXPECT_EQ(injector.calls(DeviceCall::kPin), 2u);
  EXPECT_EQ(injector.calls(DeviceCall::kAny), 3u);
}

TEST(FaultInjectorTest, OfTwoFaultsThatOneCallHitsTheStickyOneCounts) {
  const Fault transient = {DeviceCall::kCopy, 1}, sticky = {DeviceCall::kAny, 1, true};
  EXPECT_TRUE(FaultInjector({.calls = {transient, sticky}}).Count(DeviceCall::kCopy)->sticky);
  EXPECT_TRUE(FaultInjector({.calls = {sticky, transient}}).Count(DeviceCall::kCopy)->sticky);
  EXPECT_FALSE(FaultInjector({.calls = {transient, transient}}).Count(DeviceCall::kCopy)->sticky);
}

TEST(FaultInjectorTest, ACopyIsStuckForTheLongestOfItsStalls) {
  FaultInjector injector({.calls = {},
                          .stalls = {{.at = 2, .ms = 7}, {.at = 2, .ms = 3}, {.at = 3}, {}},
                          .stall_copies_from = 4,
                          .stall_ms = 5});
  for (const double expected_ms : {kForever, 7.0, kForever, 5.0, 5.0}) {
    injector.Count(DeviceCall::kKernel);
    injector.Count(DeviceCall::kCopy);
    EXPECT_EQ(injector.StallMs(), expected_ms) << injector.calls(DeviceCall::kCopy);
  }
}

TEST(FaultInjectorDeathTest, NoCallIsOfAnyKind) {
  EXPECT_DEATH(FaultInjector(FaultPlan()).Count(DeviceCall::kAny), "never a call");
}

}  // namespace
}  // namespace pinion
