#include "pinion/engine/stream/guarded_device.h"

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/forwarding_device.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::pinion::internal::GuardedDevice;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Two threads call a broken device, and the second error arrives before the first call returns. The
// first call makes the second one itself here.
TEST(GuardedDeviceTest, ALaterErrorDoesNotReplaceTheFirst) {
  const CapturedLog log;
  const auto machine = EmulatedMachine::Create(TestMachineOptions()).value();
  const auto device = std::make_shared<ForwardingDevice>(machine->device(0));
  GuardedDevice guarded(device, /*transient_retries=*/0);
  const StreamHandle stream = machine->default_stream(0);
  device->FailCalls([&](const std::string& call, uint64_t) -> absl::Status {
    if (call != "SynchronizeStream") return absl::InternalError("the first");
    EXPECT_FALSE(guarded.CreateEvent().ok());
    return absl::InternalError("the later one");
  });

  const auto first = StatusIs(absl::StatusCode::kInternal,
                              AllOf(HasSubstr("CreateEvent: the first"), Not(HasSubstr("later"))));
  EXPECT_THAT(guarded.SynchronizeStream(stream), first);
  EXPECT_THAT(guarded.health(), first);
  EXPECT_THAT(log.text(), Not(HasSubstr("later")));
}

TEST(GuardedDeviceTest, AStreamWaitThatFailedIsNotCounted) {
  const auto machine = EmulatedMachine::Create(TestMachineOptions()).value();
  const auto device = std::make_shared<ForwardingDevice>(machine->device(0));
  GuardedDevice guarded(device, /*transient_retries=*/0);
  const EventHandle event = guarded.CreateEvent().value();
  device->FailCalls([](const std::string&, uint64_t) { return absl::UnavailableError("busy"); });
  EXPECT_FALSE(guarded.StreamWaitEvent(machine->default_stream(0), event).ok());
  EXPECT_EQ(guarded.event_waits(), 0u);
}

TEST(GuardedDeviceDeathTest, NoDeviceIsTheCallersBug) {
  EXPECT_DEATH(GuardedDevice(nullptr, 0), "needs a device");
}

}  // namespace
}  // namespace pinion::testing
