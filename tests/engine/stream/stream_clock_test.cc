#include "pinion/engine/stream/stream_clock.h"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/support/forwarding_device.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace stream_clock_test {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::Duration kLong = absl::Hours(1);  // of virtual time

class StreamClockTest : public ::testing::Test {
 protected:
  void Compute(double flops) {
    Kernel kernel;
    kernel.name = "work";
    kernel.flops = flops;
    ASSERT_THAT(machine_->PrepareKernel(0, stream_), IsOk());
    ASSERT_THAT(machine_->Launch(0, stream_, kernel), IsOk());
  }
  double BusyUs() {
    EXPECT_THAT(machine_->SynchronizeDevice(0), IsOk());
    return 1e3 * machine_->time_stats(0).compute_busy_ms;
  }

  const std::shared_ptr<EmulatedMachine> machine_ = EmulatedMachine::Create({}).value();
  const std::shared_ptr<ForwardingDevice> device_ =
      std::make_shared<ForwardingDevice>(machine_->device(0));
  const StreamHandle stream_ = machine_->default_stream(0);
  StreamClock clock_{device_};
};

TEST_F(StreamClockTest, TellsWhenTheStreamGotToEachMoment) {
  Compute(1e12);  // the device is behind from here on
  std::vector<StreamClock::Moment> moments = {clock_.Now(stream_)};
  Compute(1e12);
  moments.push_back(clock_.Now(stream_));
  Compute(3e12);
  moments.push_back(clock_.Now(stream_));
  PINION_ASSERT_OK_AND_ASSIGN(const StreamClock::Times times, clock_.Read(moments, kLong));
  const double unit_us = BusyUs() / 5;
  EXPECT_FALSE(times.by_host);
  ASSERT_EQ(times.us.size(), 3u);
  EXPECT_EQ(times.us[0], 0);
  EXPECT_NEAR(times.us[1], unit_us, 0.01 * unit_us);
  EXPECT_NEAR(times.us[2], 4 * unit_us, 0.04 * unit_us);
}

TEST_F(StreamClockTest, NowWaitsForNothing) {
  Compute(1e12);
  const double before_ms = machine_->now_ms();
  for (int i = 0; i < 10; ++i) clock_.Now(stream_);
  const double host_ms = machine_->now_ms() - before_ms;
  EXPECT_EQ(machine_->calls(DeviceCall::kWaitEvent), 0u);
  EXPECT_LT(host_ms, 0.01 * 1e-3 * BusyUs());
}

TEST_F(StreamClockTest, NoMomentsTakeNoTime) {
  PINION_ASSERT_OK_AND_ASSIGN(const StreamClock::Times times, clock_.Read({}, kLong));
  EXPECT_THAT(times.us, IsEmpty());
}

TEST_F(StreamClockTest, OneMomentWithoutAnEventMakesAllTheHosts) {
  // Shared, because the device is called until the fixture ends.
  const auto fails = std::make_shared<bool>(false);
  device_->FailCalls([fails](const std::string& call, uint64_t) {
    return *fails && call == "RecordEvent" ? absl::InvalidArgumentError("injected")
                                           : absl::OkStatus();
  });
  std::vector<StreamClock::Moment> moments = {clock_.Now(stream_)};
  *fails = true;
  moments.push_back(clock_.Now(stream_));
  *fails = false;
  moments.push_back(clock_.Now(stream_));
  PINION_ASSERT_OK_AND_ASSIGN(const StreamClock::Times times, clock_.Read(moments, kLong));
  EXPECT_TRUE(times.by_host);
  for (size_t i = 0; i < moments.size(); ++i) {
    EXPECT_DOUBLE_EQ(times.us[i], moments[i].host_us - moments[0].host_us);
  }
}

TEST_F(StreamClockTest, ACallThatFailsForTheMomentIsMadeAgain) {
  device_->FailCalls([failures = 2](const std::string& call, uint64_t) mutable {
    return call == "RecordEvent" && failures-- > 0 ? absl::UnavailableError("injected")
                                                   : absl::OkStatus();
  });
  EXPECT_THAT(clock_.Now(stream_).event, ::testing::NotNull());
}

TEST_F(StreamClockTest, AStreamThatIsStuckIsTold) {
  Compute(1e18);
  const absl::StatusOr<StreamClock::Times> times =
      clock_.Read({clock_.Now(stream_)}, absl::Microseconds(1));
  EXPECT_THAT(times, StatusIs(absl::StatusCode::kDeadlineExceeded));
}

TEST_F(StreamClockTest, ABrokenDeviceIsToldAndNotCalledAgain) {
  device_->FailCalls(
      [](const std::string&, uint64_t) { return absl::InternalError("fell off the bus"); });
  const StreamClock::Moment moment = clock_.Now(stream_);
  const uint64_t calls = device_->calls();
  EXPECT_THAT(clock_.Read({moment}, kLong),
              StatusIs(absl::StatusCode::kInternal, HasSubstr("fell off")));
  EXPECT_EQ(device_->calls(), calls);
}

TEST_F(StreamClockTest, TellsWhetherAStreamCaptures) {
  EXPECT_THAT(clock_.IsCapturing(stream_), IsOkAndHolds(false));
  ASSERT_THAT(machine_->SetCapturing(stream_, true), IsOk());
  EXPECT_THAT(clock_.IsCapturing(stream_), IsOkAndHolds(true));
}

}  // namespace stream_clock_test
}  // namespace pinion::testing
