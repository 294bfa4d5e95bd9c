#include "pinion/engine/tier/host_tier.h"

#include <sys/wait.h>
#include <unistd.h>

#include <barrier>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/allocator/pinned_block.h"
#include "pinion/device/device.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/emulated_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/transfer_engine.h"
#include "pinion/tests/engine/tier/host_tier_fixture.h"
#include "pinion/tests/support/fake_source.h"
#include "pinion/tests/support/recording_trace_sink.h"
#include "pinion/tests/support/run_threads.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::SizeIs;

// -------------------------------------------------------------------------------------- sharing

TEST_F(HostTierTest, AllUsersShareOnePoolAndOneTierPerDevice) {
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> first, OfProcess());
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> second, OfProcess());
  EXPECT_EQ(first, second);
  PINION_ASSERT_OK_AND_ASSIGN(const PinnedBlock block, first->pool().Allocate(kMiB));
  EXPECT_EQ(second->pool().GetStats().requested_bytes.current, kMiB);
  std::set<std::shared_ptr<DeviceTier>> devices;
  for (const std::shared_ptr<HostTier>& user : {first, second}) {
    for (const int index : {0, 1}) {
      PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<DeviceTier> device, user->ForDevice(index));
      EXPECT_THAT(device->engine().device().name(), EndsWith(":" + std::to_string(index)));
      devices.insert(device);
    }
  }
  EXPECT_THAT(devices, SizeIs(2));
}

TEST_F(HostTierTest, SegmentsComeFromTheFirstUsersSource) {
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> first, OfProcess());
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> second,
                              HostTier::OfProcess(SmallOptions(), EmulatedBackend(machine_),
                                                  std::make_shared<FakeSource>()));
  EXPECT_EQ(second->source(), source_);
  EXPECT_EQ(source_->outstanding_bytes(), 0u);
  PINION_ASSERT_OK_AND_ASSIGN(const PinnedBlock block, second->pool().Allocate(kMiB));
  EXPECT_EQ(source_->outstanding_bytes(), 4 * kMiB);
}

TEST_F(HostTierTest, TwoMachinesHaveTwoTiers) {
  const std::shared_ptr<EmulatedMachine> other = EmulatedMachine::Create(TwoDevices()).value();
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> first, OfProcess());
  HostTierOptions options = SmallOptions();
  options.engine.transient_retries = 7;
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> second,
                              HostTier::OfProcess(options, EmulatedBackend(other), source_));
  EXPECT_NE(first, second);
  EXPECT_NE(&first->pool(), &second->pool());
}

TEST_F(HostTierTest, ItDiesWithItsLastUserAndCanThenBeMadeWithOtherOptions) {
  TierOrError first = OfProcess();
  ASSERT_THAT(first, IsOk());
  TierOrError second = OfProcess();
  HostTierOptions others = SmallOptions();
  others.engine.transient_retries = 7;
  first = absl::CancelledError("has gone");
  EXPECT_THAT(OfProcess(others), StatusIs(absl::StatusCode::kFailedPrecondition));
  const std::weak_ptr<HostTier> tier = *second;
  second = absl::CancelledError("has gone");
  EXPECT_TRUE(tier.expired());
  EXPECT_THAT(OfProcess(others), IsOk());
}

TEST_F(HostTierTest, UsersThatComeAtOnceGetOneTier) {
  constexpr int kThreads = 8;
  std::vector<TierOrError> tiers(kThreads);
  RunThreads(kThreads, [&](int thread) { tiers[thread] = OfProcess(); });
  for (const TierOrError& tier : tiers) {
    ASSERT_THAT(tier, IsOk());
    EXPECT_EQ(*tier, *tiers.front());
  }
}

// -------------------------------------------------------------------------------------- devices

// All threads find no tier before any of them creates one.
TEST_F(HostTierTest, ManyThreadsThatWantADeviceGetOneTier) {
  constexpr int kThreads = 8;
  std::barrier all_here(kThreads);
  DeviceBackend backend = EmulatedBackend(machine_);
  backend.device = [&all_here, devices = backend.device](int index) {
    all_here.arrive_and_wait();
    return devices(index);
  };
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> tier,
                              HostTier::OfProcess(SmallOptions(), backend, source_));
  std::vector<std::shared_ptr<DeviceTier>> devices(kThreads);
  RunThreads(kThreads, [&](int thread) { devices[thread] = tier->ForDevice(1).value(); });
  for (const std::shared_ptr<DeviceTier>& device : devices) EXPECT_EQ(device, devices.front());
}

TEST_F(HostTierTest, ForADeviceThatThereIsNotTheBackendsErrorIsReturned) {
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> tier, OfProcess());
  for (const int index : {2, -1, INT32_MIN, INT32_MAX}) {
    EXPECT_THAT(
        tier->ForDevice(index),
        StatusIs(absl::StatusCode::kNotFound, HasSubstr("no device emu:" + std::to_string(index) +
                                                        "; the emulated machine has 2")));
  }
  EXPECT_THAT(tier->ForDevice(1), IsOk());
}

// --------------------------------------------------------------------------------------- misuse

TEST_F(HostTierTest, WhatItIsMadeOfMustBeThere) {
  EXPECT_THAT(HostTier::OfProcess(SmallOptions(), EmulatedBackend(machine_), nullptr),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("source is null; pass")));
  EXPECT_THAT(HostTier::OfProcess(SmallOptions(), EmulatedBackend(machine_), nullptr, NewPool()),
              IsOk());
  EXPECT_THAT(HostTier::OfProcess(SmallOptions(), {"emu", nullptr}, source_),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("DeviceBackend::device of \"emu\" is not set: use")));
  DeviceBackend null = EmulatedBackend(machine_);
  null.device = [](int) -> absl::StatusOr<std::shared_ptr<Device>> { return nullptr; };
  EXPECT_THAT(HostTier(SmallOptions(), null, source_, NewPool()).ForDevice(1),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("null for device 1")));
  EXPECT_DEATH(HostTier(SmallOptions(), null, source_, nullptr), "HostTier::OfProcess makes one");
}

TEST_F(HostTierTest, ADeviceThatCannotBeSetUpNowIsTriedAgainLater) {
  bool there = false;
  DeviceBackend backend = EmulatedBackend(machine_);
  backend.device = [&, devices = backend.device](int index) {
    return there ? devices(index) : absl::UnavailableError("not yet");
  };
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> tier,
                              HostTier::OfProcess(SmallOptions(), backend, source_));
  EXPECT_THAT(tier->ForDevice(0), StatusIs(absl::StatusCode::kUnavailable));
  there = true;
  EXPECT_THAT(tier->ForDevice(0), IsOk());
}

TEST_F(HostTierTest, DevicesHaveTheEngineOfItsOptions) {
  HostTierOptions options = SmallOptions();
  const auto sink = std::make_shared<RecordingTraceSink>();
  options.engine.trace = sink;
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> tier, OfProcess(options));
  const auto uses = sink.use_count();
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<DeviceTier> device, tier->ForDevice(0));
  EXPECT_GT(sink.use_count(), uses) << "the engine has it";
}

// The inherited tier belongs to the parent, and another thread may have held the lock of the list.
TEST_F(HostTierTest, AChildOfForkMakesATierOfItsOwn) {
  PINION_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<HostTier> parents, OfProcess());
  HostTierOptions others = SmallOptions();
  others.allocator.low_percent = 80;
  EXPECT_EXIT(
      {
        if (fork() == 0) {
          const auto machine = EmulatedMachine::Create(TwoDevices()).value();
          DeviceBackend backend = EmulatedBackend(machine);
          backend.system = machine_.get();  // as with a driver
          const TierOrError own = HostTier::OfProcess(others, backend, source_);
          _exit(own.ok() && *own != parents ? 0 : 1);
        }
        int status = 0;
        wait(&status);
        std::exit(WIFEXITED(status) ? WEXITSTATUS(status) : 2);
      },
      ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace pinion::testing
