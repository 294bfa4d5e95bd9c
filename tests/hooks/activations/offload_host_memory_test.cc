// Checks reserving and trimming host memory.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/tests/hooks/activations/offload_world.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

TEST(OffloadHostMemory, WhatIsReservedIsNotPinnedInForward) {
  OffloadWorld world(SmallWindows());
  ASSERT_THAT(world.session()->Reserve(0, 4 * kMiB), IsOk());
  const uint64_t pinned = world.machine().calls(DeviceCall::kPin);
  ASSERT_GT(pinned, 0u);
  const at::Tensor y = world.Save(std::vector<int64_t>(40, 64));
  EXPECT_GE(world.stats().offloaded_bytes, 2 * kMiB);
  EXPECT_EQ(world.machine().calls(DeviceCall::kPin), pinned);
}

TEST(OffloadHostMemory, AReserveForADeviceThatThereIsNotIsAnError) {
  OffloadWorld world(SmallWindows());
  EXPECT_FALSE(world.session()->Reserve(7, kMiB).ok());
}

TEST(OffloadHostMemory, AReserveThatFailsOnceIsTriedAgainAndDisturbsNoScope) {
  OffloadWorld world(SmallWindows());
  bool fails = false;
  const DeviceBackend backend =
      OwnBackend([&](int index) -> absl::StatusOr<std::shared_ptr<Device>> {
        if (fails) return absl::UnavailableError("not now");
        return world.machine().device(index);
      });
  const auto session = OffloadSession::Create(SmallWindows(1), backend).value();
  fails = true;
  EXPECT_THAT(session->Reserve(0, kMiB), StatusIs(absl::StatusCode::kUnavailable));
  fails = false;
  {
    const OffloadScope scope(session);
    Probe(world.carrier, {world.activation(64)}, OffloadWorld::Use);
  }
  EXPECT_EQ(session->GetStats().offloaded, 1u);
  EXPECT_THAT(session->Reserve(0, kMiB), IsOk());
}

TEST(OffloadHostMemory, AReserveOpensADeviceThatIsInUseNoMore) {
  OffloadWorld world(SmallWindows());
  int opened = 0;
  const DeviceBackend backend =
      OwnBackend([&](int index) -> absl::StatusOr<std::shared_ptr<Device>> {
        ++opened;
        return world.machine().device(index);
      });
  const auto session = OffloadSession::Create(SmallWindows(), backend).value();
  ASSERT_THAT(session->Reserve(0, kMiB), IsOk());
  const int before = opened;
  EXPECT_THAT(session->Reserve(0, kMiB), IsOk());
  EXPECT_EQ(opened, before);
}

TEST(OffloadHostMemory, ATrimGivesBackWhatIsReservedAndBeforeThatNothing) {
  OffloadWorld world(SmallWindows());
  EXPECT_EQ(world.session()->Trim(0).value(), 0u);
  ASSERT_THAT(world.session()->Reserve(0, 4 * kMiB), IsOk());
  const uint64_t reserved = world.session()->GetAllocatorStats().cached_bytes.current;
  EXPECT_GE(reserved, 4 * kMiB);
  EXPECT_EQ(world.session()->Trim(0).value(), reserved);
}

}  // namespace
}  // namespace pinion::testing
