// What a session may be told, and how it is switched off.

#include "pinion/hooks/offload_options.h"

#include <c10/core/ScalarType.h>

#include <cstdlib>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/device_backend.h"
#include "pinion/hooks/offload_session.h"
#include "pinion/tests/hooks/emu_fixture.h"
#include "pinion/tests/hooks/test_net.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::testing::HasSubstr;

TEST(OffloadOptionsTest, AWindowOfZeroIsRefusedByName) {
  OffloadOptions options;
  options.eviction_window_bytes = 0;
  EXPECT_THAT(options.Validate(), StatusIs(absl::StatusCode::kInvalidArgument,
                                           HasSubstr("eviction_window_bytes is 0")));
  options = OffloadOptions();
  options.prefetch_window_bytes = 0;
  EXPECT_THAT(options.Validate(), StatusIs(absl::StatusCode::kInvalidArgument,
                                           HasSubstr("prefetch_window_bytes is 0")));
  EXPECT_THAT(OffloadSession::Create(options, DeviceBackend()),
              StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(OffloadOptionsTest, ADeviceTypeThatLibTorchDoesNotKnowIsRefusedByName) {
  EXPECT_THAT(OffloadSession::Create({}, DeviceBackend{"abacus", nullptr}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("\"abacus\"")));
}

TEST(OffloadOptionsTest, ADisabledSessionDoesNothing) {
  OffloadOptions options = SmallWindows();
  options.enabled = false;
  EmuWorld world(MachineOptions(), options);
  const TestNet net(world.device(), at::kFloat);
  ExpectSameGradients(TrainStep(net, nullptr), TrainStep(net, world.session()));
  EXPECT_EQ(world.session()->GetStats().packed, 0u);
}

TEST(OffloadOptionsTest, TheEnvironmentVariableDisablesEverySession) {
  ASSERT_EQ(setenv("PINION_DISABLE", "1", 1), 0);
  EmuWorld world;
  ASSERT_EQ(unsetenv("PINION_DISABLE"), 0);
  EXPECT_FALSE(world.session()->options().enabled);
  const TestNet net(world.device(), at::kFloat);
  TrainStep(net, world.session());
  EXPECT_EQ(world.session()->GetStats().packed, 0u);
}

}  // namespace
}  // namespace pinion::testing
