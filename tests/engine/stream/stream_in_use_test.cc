#include "pinion/engine/stream/stream_in_use.h"

#include <memory>
#include <thread>

#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/stream/guarded_device.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/support/forwarding_device.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::pinion::internal::GuardedDevice;

class StreamInUseTest : public ::testing::Test {
 protected:
  // Counts calls that reach the device, and supports the legacy default stream.
  class AskedDevice : public ForwardingDevice {
   public:
    using ForwardingDevice::ForwardingDevice;
    absl::StatusOr<bool> IsCapturing(StreamHandle stream) override {
      ++asked;
      return stream == StreamHandle(nullptr) ? false : ForwardingDevice::IsCapturing(stream);
    }
    int asked = 0;
  };

  bool IsCapturing(StreamHandle stream) { return guarded_.IsCapturing(stream).value(); }
  int asked() const { return device_->asked; }

  const std::shared_ptr<EmulatedMachine> machine_ =
      EmulatedMachine::Create(TestMachineOptions()).value();
  const std::shared_ptr<AskedDevice> device_ = std::make_shared<AskedDevice>(machine_->device(0));
  GuardedDevice guarded_{device_, /*transient_retries=*/0};
  const StreamHandle stream_ = device_->CreateStream("in use").value();
  const StreamHandle other_ = device_->CreateStream("other").value();
};

TEST_F(StreamInUseTest, AStreamIsAskedOnceWhileItIsInUseAndEachTimeAfterwards) {
  {
    const StreamInUse in_use(*device_, stream_);
    for (int i = 0; i < 3; ++i) EXPECT_FALSE(IsCapturing(stream_));
    EXPECT_EQ(asked(), 1);
  }
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(IsCapturing(stream_));
  EXPECT_EQ(asked(), 4);
}

TEST_F(StreamInUseTest, AnOperatorThatIsCapturedIsAskedForEachTime) {
  const StreamInUse in_use(*device_, stream_);
  ASSERT_THAT(machine_->SetCapturing(stream_, true), IsOk());
  EXPECT_TRUE(IsCapturing(stream_));
  EXPECT_TRUE(IsCapturing(stream_));
  ASSERT_THAT(machine_->SetCapturing(stream_, false), IsOk());
  EXPECT_FALSE(IsCapturing(stream_));
}

TEST_F(StreamInUseTest, OtherStreamsAndOtherDevicesAreAsked) {
  const AskedDevice other_device(machine_->device(0));
  const StreamInUse in_use(other_device, stream_);
  ASSERT_THAT(machine_->SetCapturing(other_, true), IsOk());
  for (int i = 0; i < 2; ++i) {
    EXPECT_FALSE(IsCapturing(stream_));
    EXPECT_TRUE(IsCapturing(other_));
  }
  EXPECT_EQ(asked(), 4);
}

TEST_F(StreamInUseTest, AnotherThreadAsks) {
  const StreamInUse in_use(*device_, stream_);
  EXPECT_FALSE(IsCapturing(stream_));
  std::thread([&] { EXPECT_FALSE(IsCapturing(stream_)); }).join();
  EXPECT_EQ(asked(), 2);
}

// An operator's hook may run another operator on another stream.
TEST_F(StreamInUseTest, TheInnermostOneCountsAndTheOuterOneGoesOn) {
  const StreamInUse outer(*device_, stream_);
  EXPECT_FALSE(IsCapturing(stream_));
  {
    const StreamInUse inner(*device_, other_);
    EXPECT_FALSE(IsCapturing(other_));
    EXPECT_FALSE(IsCapturing(other_));
    EXPECT_FALSE(IsCapturing(stream_));
    EXPECT_EQ(asked(), 3);
  }
  EXPECT_FALSE(IsCapturing(stream_));
  EXPECT_EQ(asked(), 3);
}

// The legacy stream captures nothing. Only callers outside of operators must check whether another
// stream's capture depends on it.
TEST_F(StreamInUseTest, TheLegacyDefaultStreamIsNotAskedWhileItIsInUse) {
  const StreamHandle legacy(nullptr);
  {
    const StreamInUse in_use(*device_, legacy);
    EXPECT_FALSE(IsCapturing(legacy));
    EXPECT_EQ(asked(), 0);
  }
  EXPECT_FALSE(IsCapturing(legacy));
  EXPECT_EQ(asked(), 1);
}

}  // namespace
}  // namespace pinion::testing
