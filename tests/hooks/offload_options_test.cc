// What a session may be told, and how it is switched off.

#include "pinion/hooks/offload_options.h"

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <cstdlib>
#include <optional>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/engine/engine_stats.h"
#include "pinion/engine/link_calibration.h"
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

// --- The link ---

OffloadOptions WithoutLink() {
  OffloadOptions options = SmallWindows();
  options.link.reset();
  return options;
}

TEST(OffloadOptionsLink, EachDeviceIsMeasuredWhenItIsFirstUsed) {
  EmuWorld world(MachineOptions(), WithoutLink());
  const TestNet net(world.device(), at::kFloat);
  const Gradients plain = TrainStep(net, nullptr);
  EXPECT_FALSE(world.session()->GetLink(0).has_value());
  ExpectSameGradients(plain, TrainStep(net, world.session()));
  const std::optional<LinkCalibration> link = world.session()->GetLink(0);
  ASSERT_TRUE(link.has_value());
  EXPECT_TRUE(link->modelled);
  const LinkModel& model = world.machine().options().preset.link;
  EXPECT_NEAR(link->h2d.gb_per_s, model.h2d_gb_per_s, 0.05 * model.h2d_gb_per_s);
  EXPECT_NEAR(link->d2h.piece_us, model.piece_us, 0.2 * model.piece_us);
}

// Of an earlier run, say.
TEST(OffloadOptionsLink, AGivenLinkIsNotMeasured) {
  const auto copies = [](const OffloadOptions& options) {
    EmuWorld world(MachineOptions(), options);
    const TestNet net(world.device(), at::kFloat);
    TrainStep(net, world.session());
    EXPECT_TRUE(world.session()->GetLink(0).has_value());
    const EngineStats engine = world.session()->GetEngineStats(0);
    return world.machine().calls(DeviceCall::kCopy) - engine.d2h.submitted_transfers -
           engine.h2d.submitted_transfers;
  };
  EXPECT_LT(copies(SmallWindows()), copies(WithoutLink()));
}

TEST(OffloadOptionsLink, ADeviceThatCannotBeMeasuredIsTakenForPcie4) {
  EmuWorld world(MachineOptions(), WithoutLink());
  const TestNet net(world.device(), at::kFloat);
  const Gradients plain = TrainStep(net, nullptr);
  ASSERT_THAT(world.Synchronize(), IsOk());
  const uint64_t in_use = world.device_bytes();
  ASSERT_THAT(world.machine().SetMemoryLimit(0, in_use + 512 * kKiB), IsOk());
  ExpectSameGradients(plain, TrainStep(net, world.session()));
  EXPECT_EQ(world.session()->GetLink(0)->h2d.gb_per_s, AssumedLink().h2d.gb_per_s);
  EXPECT_GT(world.session()->GetStats().offloaded, 0u);
}

TEST(OffloadOptionsLink, OneWithoutBandwidthIsRefused) {
  OffloadOptions options;
  options.link = LinkCalibration();
  EXPECT_THAT(options.Validate(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("without bandwidth")));
}

}  // namespace
}  // namespace pinion::testing
