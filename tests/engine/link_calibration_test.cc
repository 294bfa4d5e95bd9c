#include "pinion/engine/link_calibration.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/engine/host_buffer.h"
#include "pinion/engine/link_curve.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/support/forwarding_device.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::testing::AllOf;
using testing::EngineWorld;
using testing::ForwardingDevice;
using ::testing::HasSubstr;
using testing::IsOk;
using testing::StatusIs;
using testing::TestMachineOptions;

constexpr double kOnePercent = 0.01;

class LinkCalibrationTest : public ::testing::TestWithParam<std::string> {
 protected:
  static EmulatedOptions Machine(const std::string& preset) {
    EmulatedOptions options = TestMachineOptions();
    options.memory_bytes = 64 * kMiB;
    options.preset = FindPreset(preset).value();
    return options;
  }

  static void ExpectModel(const absl::StatusOr<LinkCalibration>& link, const LinkModel& model) {
    ASSERT_THAT(link, IsOk());
    EXPECT_NEAR(link->h2d.gb_per_s, model.h2d_gb_per_s, kOnePercent * model.h2d_gb_per_s);
    EXPECT_NEAR(link->d2h.gb_per_s, model.d2h_gb_per_s, kOnePercent * model.d2h_gb_per_s);
    EXPECT_NEAR(link->h2d_duplex_gb_per_s, model.h2d_duplex_gb_per_s,
                kOnePercent * model.h2d_duplex_gb_per_s);
    EXPECT_NEAR(link->d2h_duplex_gb_per_s, model.d2h_duplex_gb_per_s,
                kOnePercent * model.d2h_duplex_gb_per_s);
    for (const LinkCurve& curve : {link->h2d, link->d2h}) {
      EXPECT_NEAR(curve.fixed_us, model.fixed_us, kOnePercent * model.fixed_us);
      EXPECT_NEAR(curve.piece_us, model.piece_us, kOnePercent * model.piece_us);
    }
  }
};

TEST_P(LinkCalibrationTest, FindsThePresetBack) {
  EngineWorld world(Machine(GetParam()));
  ExpectModel(CalibrateLink(*world.machine().device(0), world.allocator()),
              world.machine().options().preset.link);
}

INSTANTIATE_TEST_SUITE_P(Presets, LinkCalibrationTest, ::testing::ValuesIn(PresetNames()),
                         [](const auto& info) { return info.param; });

// The host's cost of submission is not the link's, however slow the host.
TEST_F(LinkCalibrationTest, ASlowHostDoesNotMakeTheLinkSlow) {
  EmulatedOptions options = Machine("gh200_c2c");
  options.preset.host_call_us = 6;
  options.preset.host_event_us = 6;
  EngineWorld world(options);
  ExpectModel(CalibrateLink(*world.machine().device(0), world.allocator()), options.preset.link);
}

TEST_F(LinkCalibrationTest, AHostThatNoGateCanOutlastIsAnErrorThatSaysSo) {
  EmulatedOptions options = Machine("h100_pcie5");
  options.preset.host_call_us = 1e6;
  EngineWorld world(options);
  EXPECT_THAT(CalibrateLink(*world.machine().device(0), world.allocator()),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("emu:0"), HasSubstr("apart from the host"))));
}

TEST_F(LinkCalibrationTest, ASmallDeviceIsMeasuredWithLessMemory) {
  EmulatedOptions options = Machine("h100_pcie5");
  options.memory_bytes = 3 * kMiB;
  EngineWorld world(options);
  ExpectModel(CalibrateLink(*world.machine().device(0), world.allocator()), options.preset.link);
}

TEST_F(LinkCalibrationTest, AFullDeviceIsAnErrorThatSaysWhatIsMissing) {
  EmulatedOptions options = Machine("h100_pcie5");
  options.memory_bytes = 512 * kKiB;
  EngineWorld world(options);
  EXPECT_THAT(CalibrateLink(*world.machine().device(0), world.allocator()),
              StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("emu:0")));
}

TEST_F(LinkCalibrationTest, GivesEverythingBack) {
  EngineWorld world(Machine("h100_pcie5"));
  ASSERT_THAT(CalibrateLink(*world.machine().device(0), world.allocator()), IsOk());
  EXPECT_EQ(world.machine().memory_stats(0).in_use_bytes, 0u);
  EXPECT_EQ(world.allocator().GetStats().used_bytes.current, 0u);
  EXPECT_THAT(world.machine().races(), ::testing::IsEmpty());
}

// Every k-th call of a calibration fails in turn: an error comes back, and nothing stays behind.
TEST_F(LinkCalibrationTest, WhateverCallFailsEverythingIsGivenBack) {
  EmulatedOptions options = Machine("h100_pcie5");
  options.memory_bytes = 3 * kMiB;  // little to move
  uint64_t calls = 0;
  {
    EngineWorld world(options);
    ForwardingDevice device(world.machine().device(0));
    ASSERT_THAT(CalibrateLink(device, world.allocator()), IsOk());
    calls = device.calls();
  }
  EngineWorld world(options);
  // All of the setting up and the first samples, then a sample of the rest.
  for (uint64_t k = 1; k < calls; k += k < 100 ? 1 : 97) {
    ForwardingDevice device(world.machine().device(0));
    std::string failed;
    device.FailCalls([&failed, k](const std::string& call, uint64_t number) {
      if (number != k) return absl::OkStatus();
      failed = call;
      return absl::UnavailableError("injected");
    });
    const absl::StatusOr<LinkCalibration> link = CalibrateLink(device, world.allocator());
    const std::string which = failed + ", call " + std::to_string(k);
    if (failed == "Free") {  // nothing can be done about it any more, and the result is known
      EXPECT_THAT(link, IsOk()) << which;
      continue;
    }
    if (failed != "DestroyEvent" && failed != "DestroyStream") {
      EXPECT_THAT(link, StatusIs(absl::StatusCode::kUnavailable)) << which;
    }
    EXPECT_EQ(world.machine().memory_stats(0).in_use_bytes, 0u) << which;
    EXPECT_EQ(world.allocator().GetStats().used_bytes.current, 0u) << which;
    ASSERT_THAT(world.machine().races(), ::testing::IsEmpty()) << which;
  }
}

// Its copies could still be written to by a device that has stopped answering.
TEST_F(LinkCalibrationTest, AfterAStickyErrorPinnedMemoryIsNotReused) {
  EmulatedOptions options = Machine("h100_pcie5");
  options.faults.calls = {{DeviceCall::kCopy, 50, /*sticky=*/true}};
  EngineWorld world(options);
  EXPECT_THAT(CalibrateLink(*world.machine().device(0), world.allocator()),
              StatusIs(absl::StatusCode::kInternal));
  EXPECT_GT(world.allocator().GetStats().used_bytes.current, 0u);
}

TEST_F(LinkCalibrationTest, BesideOtherTrafficItFindsALinkThatIsNoFaster) {
  EngineWorld world(Machine("h100_pcie5"));
  uint8_t* const data = world.AllocateDevice(8 * kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(8 * kMiB);
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop.load()) {
      if (!world.CopyOut(host, data, world.compute()).Wait(absl::Seconds(10)).ok()) break;
    }
  });
  const absl::StatusOr<LinkCalibration> link =
      CalibrateLink(*world.machine().device(0), world.allocator());
  stop.store(true);
  other.join();
  ASSERT_THAT(link, IsOk());
  const LinkModel& model = world.machine().options().preset.link;
  EXPECT_LT(link->d2h.gb_per_s, 1.01 * model.d2h_gb_per_s);
  EXPECT_LT(link->h2d.gb_per_s, 1.01 * model.h2d_gb_per_s);
  EXPECT_THAT(world.machine().races(), ::testing::IsEmpty());
}

TEST_F(LinkCalibrationTest, ItsTextSaysThatTimesAreModelled) {
  LinkCalibration link;
  link.h2d = {.fixed_us = 3, .piece_us = 1, .gb_per_s = 55.6};
  link.d2h = {.fixed_us = 2.5, .piece_us = 1, .gb_per_s = 57.3};
  link.h2d_duplex_gb_per_s = 51.9;
  link.d2h_duplex_gb_per_s = 49.1;
  EXPECT_EQ(link.ToString(),
            "H2D 55.6 GB/s alone, 51.9 GB/s with both directions busy, 3 us per copy, 1 us per "
            "further piece\n"
            "D2H 57.3 GB/s alone, 49.1 GB/s with both directions busy, 2.5 us per copy, 1 us per "
            "further piece");
  link.modelled = true;
  EXPECT_THAT(link.ToString(), HasSubstr("(modelled)"));
}

}  // namespace
}  // namespace pinion
