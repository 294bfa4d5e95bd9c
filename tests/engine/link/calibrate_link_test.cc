#include "pinion/engine/link/calibrate_link.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/allocator_options.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/device/device.h"
#include "pinion/device/emulated/cost_model.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/engine/copy_batch.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/tests/engine/engine_world.h"
#include "pinion/tests/support/captured_log.h"
#include "pinion/tests/support/fake_host.h"
#include "pinion/tests/support/forwarding_device.h"
#include "pinion/tests/support/sanitizers.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::testing::AllOf;
using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Key;

constexpr double kOnePercent = 0.01;
constexpr uint64_t kLittle = 3 * kMiB;

class LinkCalibrationTest : public ::testing::TestWithParam<std::string> {
 protected:
  // Little memory makes copies short, for tests that do not depend on their size.
  static EmulatedOptions Machine(const std::string& preset, uint64_t memory_bytes = 64 * kMiB) {
    EmulatedOptions options = TestMachineOptions();
    options.memory_bytes = memory_bytes;
    options.preset = FindPreset(preset).value();
    return options;
  }

  static std::shared_ptr<PinnedAllocator> LittleAllocator(EmulatedMachine& machine,
                                                          bool pageable_fallback = false) {
    AllocatorOptions options;
    options.pageable_fallback = pageable_fallback;
    options.segment_bytes = options.max_locked_bytes = 2 * kMiB;
    return PinnedAllocator::Create(options, machine.device(0)->pinned_source(), FakeHost().Probe())
        .value();
  }

  static absl::StatusOr<LinkCalibration> Calibrate(EngineWorld& world) {
    return CalibrateLink(*world.machine().device(0), world.allocator());
  }

  static void ExpectModel(const absl::StatusOr<LinkCalibration>& link, const LinkModel& model,
                          bool modelled = true) {
    ASSERT_THAT(link, IsOk());
    EXPECT_EQ(link->modelled, modelled);
    const auto is_near = [](double value) { return DoubleNear(value, kOnePercent * value); };
    EXPECT_THAT(link->h2d.gb_per_s, is_near(model.h2d_gb_per_s));
    EXPECT_THAT(link->d2h.gb_per_s, is_near(model.d2h_gb_per_s));
    EXPECT_THAT(link->h2d_duplex_gb_per_s, is_near(model.h2d_duplex_gb_per_s));
    EXPECT_THAT(link->d2h_duplex_gb_per_s, is_near(model.d2h_duplex_gb_per_s));
    for (const LinkCurve& curve : {link->h2d, link->d2h}) {
      EXPECT_THAT(curve.fixed_us, is_near(model.fixed_us));
      EXPECT_THAT(curve.piece_us, is_near(model.piece_us));
    }
  }
};

TEST_P(LinkCalibrationTest, FindsThePresetBack) {
  EngineWorld world(Machine(GetParam()));
  ExpectModel(Calibrate(world), world.machine().options().preset.link);
}

INSTANTIATE_TEST_SUITE_P(Presets, LinkCalibrationTest, ::testing::ValuesIn(PresetNames()),
                         [](const auto& info) { return info.param; });

// The host's submission cost must not count as the link's, however slow the host is.
TEST_F(LinkCalibrationTest, ASlowHostDoesNotMakeTheLinkSlow) {
  EmulatedOptions options = Machine("gh200_c2c");
  options.preset.host_call_us = 6;
  options.preset.host_event_us = 6;
  EngineWorld world(options);
  ExpectModel(Calibrate(world), options.preset.link);
}

TEST_F(LinkCalibrationTest, APieceThatCostsNextToNothingIsMeasured) {
  EmulatedOptions options = Machine("h100_pcie5");
  options.preset.link.piece_us = 0.25;
  EngineWorld world(options);
  ExpectModel(Calibrate(world), options.preset.link);
}

// Imitates hardware whose times vary.
class ScatteringDevice : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;
  std::function<double(int sample)> factor;
  int samples = 0;
  std::vector<uint64_t> allocated;  // requested sizes, served or not
  std::map<uint64_t, int> copied;   // number of single copies by size
  const char* begin = nullptr;      // first byte touched on the host
  const char* end = nullptr;

  DeviceInfo info() const override {
    DeviceInfo info = ForwardingDevice::info();
    info.modelled = factor == nullptr;
    return info;
  }
  absl::StatusOr<double> ElapsedMs(EventHandle start, EventHandle stop) override {
    const double scale = factor == nullptr ? 1 : factor(samples);
    ++samples;
    const absl::StatusOr<double> ms = ForwardingDevice::ElapsedMs(start, stop);
    return ms.ok() ? absl::StatusOr<double>(scale * *ms) : ms;
  }
  absl::StatusOr<void*> Allocate(uint64_t size_bytes, StreamHandle stream) override {
    allocated.push_back(size_bytes);
    return ForwardingDevice::Allocate(size_bytes, stream);
  }
  absl::Status CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                         StreamHandle stream) override {
    for (const CopyPiece& piece : pieces) {
      if (pieces.size() == 1) ++copied[piece.size_bytes];
      const bool out = direction == CopyDirection::kDeviceToHost;
      const auto* const host = static_cast<const char*>(out ? piece.dst : piece.src);
      begin = begin == nullptr ? host : std::min(begin, host);
      end = std::max(end, host + piece.size_bytes);
    }
    return ForwardingDevice::CopyAsync(direction, pieces, stream);
  }
};

TEST_F(LinkCalibrationTest, OfTimesThatScatterTheMedianCounts) {
  const EmulatedOptions options = Machine("h100_pcie5");
  EngineWorld world(options);
  ScatteringDevice modelled(world.machine().device(0));
  ASSERT_THAT(CalibrateLink(modelled, world.allocator()), IsOk());
  ScatteringDevice device(world.machine().device(0));
  device.factor = [](int sample) { return std::vector<double>{1, 0.1, 10, 0.1, 10}[sample % 5]; };
  ExpectModel(CalibrateLink(device, world.allocator()), options.preset.link, /*modelled=*/false);
  EXPECT_EQ(device.samples, 5 * modelled.samples);
}

TEST_F(LinkCalibrationTest, TimesThatShrinkAreNoise) {
  EngineWorld world(Machine("h100_pcie5", kLittle));
  ScatteringDevice device(world.machine().device(0));
  device.factor = [](int sample) { return std::pow(0.5, sample); };
  EXPECT_THAT(CalibrateLink(device, world.allocator()),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("noise")));
}

TEST_F(LinkCalibrationTest, HalfOfTheMemoryIsMeasuredInCopiesOfManySizes) {
  EngineWorld world(Machine("h100_pcie5"));
  ScatteringDevice device(world.machine().device(0));
  ASSERT_THAT(CalibrateLink(device, world.allocator()), IsOk());
  EXPECT_EQ(device.end - device.begin, 16 * kMiB);
  EXPECT_THAT(device.copied,
              ElementsAre(Key(4 * kKiB), Key(16 * kKiB), Key(64 * kKiB), Key(256 * kKiB),
                          Key(512 * kKiB), Key(kMiB), Key(2 * kMiB), Key(4 * kMiB), Key(8 * kMiB)));
  // In both directions there are sixteen small copies, and large ones of 8 MiB in all.
  EXPECT_EQ(device.copied[4 * kKiB], 2 * 16);
  EXPECT_EQ(device.copied[kMiB], 2 * 8);
}

TEST_F(LinkCalibrationTest, AHostThatNoGateCanOutlastIsAnErrorThatSaysSo) {
  EmulatedOptions options = Machine("h100_pcie5", kLittle);
  options.preset.host_call_us = 1e6;
  EngineWorld world(options);
  EXPECT_THAT(Calibrate(world),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       AllOf(HasSubstr("emu:0"), HasSubstr("apart from the host"))));
}

TEST_F(LinkCalibrationTest, ASmallDeviceIsMeasuredWithLessMemory) {
  for (const uint64_t memory_bytes : {3 * kMiB, kMiB}) {
    const EmulatedOptions options = Machine("h100_pcie5", memory_bytes);
    EngineWorld world(options);
    ScatteringDevice device(world.machine().device(0));
    ExpectModel(CalibrateLink(device, world.allocator()), options.preset.link);
    std::vector<uint64_t> asked_for = {16 * kMiB, 8 * kMiB, 4 * kMiB, 2 * kMiB};
    if (memory_bytes == kMiB) asked_for.push_back(kMiB);
    EXPECT_EQ(device.allocated, asked_for);
  }
}

TEST_F(LinkCalibrationTest, LittlePinnedMemoryIsAllThatIsUsed) {
  const EmulatedOptions machine_options = Machine("h100_pcie5");
  const auto machine = EmulatedMachine::Create(machine_options).value();
  const auto allocator = LittleAllocator(*machine, /*pageable_fallback=*/true);
  ExpectModel(CalibrateLink(*machine->device(0), *allocator), machine_options.preset.link);
  const PinnedBlock most = allocator->Allocate(3 * kMiB / 2).value();
  EXPECT_THAT(
      CalibrateLink(*machine->device(0), *allocator),
      StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("no pinned memory is left")));
}

TEST_F(LinkCalibrationTest, AFullDeviceIsAnErrorThatSaysWhatIsMissing) {
  EngineWorld world(Machine("h100_pcie5", 512 * kKiB));
  const CapturedLog log;
  EXPECT_THAT(Calibrate(world), StatusIs(absl::StatusCode::kResourceExhausted, HasSubstr("emu:0")));
  EXPECT_EQ(log.text(), "");
}

TEST_F(LinkCalibrationTest, GivesEverythingBack) {
  EngineWorld world(Machine("h100_pcie5"));
  const CapturedLog log;
  ASSERT_THAT(Calibrate(world), IsOk());
  EXPECT_EQ(world.machine().memory_stats(0).in_use_bytes, 0u);
  EXPECT_EQ(world.allocator().GetStats().used_bytes.current, 0u);
  EXPECT_THAT(world.machine().races(), ::testing::IsEmpty());
  EXPECT_EQ(log.text(), "");
}

// A stuck stream may write to the memory at any later time.
TEST_F(LinkCalibrationTest, WhatIsNotKnownToBeOverKeepsItsMemory) {
  EngineWorld world(Machine("h100_pcie5"));
  const CapturedLog log;
  ForwardingDevice device(world.machine().device(0));
  device.FailCalls([](const std::string& call, uint64_t) {
    return call == "WaitEvent" ? absl::DeadlineExceededError("stuck") : absl::OkStatus();
  });
  EXPECT_THAT(CalibrateLink(device, world.allocator()),
              StatusIs(absl::StatusCode::kDeadlineExceeded));
  EXPECT_GE(world.allocator().GetStats().used_bytes.current, 16 * kMiB);
  EXPECT_EQ(world.machine().memory_stats(0).in_use_bytes, 16 * kMiB);
  EXPECT_THAT(log.text(), HasSubstr("16 MiB of pinned memory leak"));
}

// Makes every k-th call fail in turn: each run must return an error and leak nothing.
TEST_F(LinkCalibrationTest, WhateverCallFailsEverythingIsGivenBack) {
  EmulatedOptions options = Machine("h100_pcie5", kLittle);
  // On a slow link a gate needs few bytes.
  options.preset.link.h2d_gb_per_s = options.preset.link.h2d_duplex_gb_per_s = 1;
  options.preset.link.d2h_gb_per_s = options.preset.link.d2h_duplex_gb_per_s = 1;
  uint64_t calls = 0;
  uint64_t freed_at = 0;
  std::vector<uint64_t> failing;
  {
    EngineWorld world(options);
    const auto allocator = LittleAllocator(world.machine());
    ForwardingDevice device(world.machine().device(0));
    device.FailCalls([&](const std::string& call, uint64_t number) {
      if (call == "Free") freed_at = number;
      if (call == "CreateStream" || call == "CreateEvent") failing.push_back(number);
      return absl::OkStatus();
    });
    ASSERT_THAT(CalibrateLink(device, *allocator), IsOk());
    calls = device.calls();
  }
  // Fails each call of the setup, the first samples and the end, and some of the others. Excludes
  // the last record and wait, whose failure leaks memory. ThreadSanitizer runs fewer of them:
  // copies are slow there, and no second thread could race.
  const uint64_t all = RoundsWithoutThreads(100);
  for (uint64_t k = 1; k + all < freed_at; k += k < all ? 1 : 97) failing.push_back(k);
  for (uint64_t k = freed_at - all; k <= calls; ++k) {
    if (k < freed_at - 2 || k > freed_at) failing.push_back(k);
  }
  failing.push_back(freed_at);  // the last, because it leaves less memory
  EngineWorld world(options);
  const auto allocator = LittleAllocator(world.machine());
  for (const uint64_t k : failing) {
    const CapturedLog log;
    ForwardingDevice device(world.machine().device(0));
    std::string failed;
    device.FailCalls([&failed, k](const std::string& call, uint64_t number) {
      if (number != k) return absl::OkStatus();
      failed = call;
      return absl::UnavailableError("injected");
    });
    const absl::StatusOr<LinkCalibration> link = CalibrateLink(device, *allocator);
    const std::string which = failed + ", call " + std::to_string(k);
    if (failed == "Free") {  // the result is known, and the failure cannot be handled
      EXPECT_THAT(link, IsOk()) << which;
      EXPECT_THAT(log.text(), HasSubstr("link calibration: injected"));
      continue;
    }
    const int left = device.live_events() + device.live_streams();
    if (failed == "DestroyEvent" || failed == "DestroyStream") {
      EXPECT_EQ(left, 1) << which;
      EXPECT_THAT(log.text(), HasSubstr("leaks: injected")) << which;
    } else {
      EXPECT_THAT(link, StatusIs(absl::StatusCode::kUnavailable)) << which;
      EXPECT_EQ(left, 0) << which;
      EXPECT_EQ(log.text(), "") << which;
    }
    EXPECT_EQ(world.machine().memory_stats(0).in_use_bytes, 0u) << which;
    EXPECT_EQ(allocator->GetStats().used_bytes.current, 0u) << which;
    ASSERT_THAT(world.machine().races(), ::testing::IsEmpty()) << which;
  }
}

// A device that stopped responding may still write to the copies' memory.
TEST_F(LinkCalibrationTest, AfterAStickyErrorPinnedMemoryIsNotReused) {
  EmulatedOptions options = Machine("h100_pcie5");
  options.faults.calls = {{DeviceCall::kCopy, 50, /*sticky=*/true}};
  EngineWorld world(options);
  EXPECT_THAT(Calibrate(world), StatusIs(absl::StatusCode::kInternal));
  EXPECT_GT(world.allocator().GetStats().used_bytes.current, 0u);
}

TEST_F(LinkCalibrationTest, BesideOtherTrafficItFindsALinkThatIsNoFaster) {
  EngineWorld world(Machine("h100_pcie5"));
  uint8_t* const data = world.AllocateDevice(8 * kMiB);
  const std::shared_ptr<HostBuffer> host = world.NewHostBuffer(8 * kMiB);
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop.load()) {
      if (!world.CopyOut(host, data).Wait(absl::Seconds(10)).ok()) break;
    }
  });
  const absl::StatusOr<LinkCalibration> link = Calibrate(world);
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

TEST_F(LinkCalibrationTest, WhatWasNotMeasuredIsZero) {
  const LinkCalibration link;
  EXPECT_EQ(link.h2d_duplex_gb_per_s, 0);
  EXPECT_EQ(link.d2h_duplex_gb_per_s, 0);
  EXPECT_FALSE(link.modelled);
}

}  // namespace
}  // namespace pinion::testing
