// Checks the host's work per saved tensor by counting copies, waits and look-ups, without timing.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/activations/offload_world.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/support/forwarding_device.h"

namespace pinion::testing {
namespace {

TEST(OffloadHostCost, TheTimeInPackAndUnpackIsCounted) {
  OffloadWorld world(SmallWindows());
  const at::Tensor y = world.Save({64});
  const double pack_us = world.stats().pack_unpack_us;
  EXPECT_GT(pack_us, 0);
  y.backward();
  EXPECT_GT(world.stats().pack_unpack_us, pack_us);
}

TEST(OffloadHostCost, TensorsThatFillAQuarterOfTheWindowTravelTogetherBothWays) {
  OffloadWorld world(SmallWindows(512 * kKiB));
  const at::Tensor y = world.Save(std::vector<int64_t>(8, 64));
  EXPECT_EQ(world.session()->GetEngineStats(0).d2h.submitted_transfers, 4u);
  world.session()->FreeDeviceMemory(0);
  y.backward();
  EXPECT_EQ(world.session()->GetEngineStats(0).h2d.submitted_transfers, 5u)
      << "the one that is read first, and the other seven by twos";
}

TEST(OffloadHostCost, EachParcelIsLookedAtOnceToFetchAheadWhetherItIsAwayOrNot) {
  constexpr int kTensors = 200;
  for (const bool away : {false, true}) {
    SCOPED_TRACE(away ? "away" : "on the device");
    OffloadWorld world(Windows(away ? 1 : 32 * kMiB, 64 * kKiB));
    world.Save(std::vector<int64_t>(kTensors, 32)).backward();
    const OffloadStats stats = world.QuietStats();
    ASSERT_EQ(stats.reused_on_device, away ? 0u : static_cast<uint64_t>(kTensors));
    EXPECT_EQ(stats.fetched_bytes, away ? kTensors * 32 * kKiB : 0u);
    EXPECT_GE(stats.prefetch_looks, kTensors - 1u);
    EXPECT_LE(stats.prefetch_looks, 3u * kTensors);
  }
}

TEST(OffloadHostCost, ABackwardInsideAnotherFetchesNothingAheadThatIsThere) {
  OffloadWorld world(Windows(1, kMiB));
  const at::Tensor y = InScope(world.session(), world.carrier, [&](at::Tensor& y) {
    y = Probe(y, {world.activation(64)}, OffloadWorld::Use);
    const at::Tensor inner = Probe(world.carrier, {world.activation(64)}, OffloadWorld::Use);
    y = Probe(y, {world.activation(64)},
              [inner](const at::Tensor& grad, const UnpackSaved& unpack) {
                unpack();
                inner.backward();
                return grad;
              });
  });
  y.backward();
  EXPECT_EQ(world.stats().prefetch_hits, 2u);
  EXPECT_EQ(world.stats().fetched_bytes, 3 * 64 * kKiB);
}

TEST(OffloadHostCost, ParcelsThatAreEvictedTogetherAreWaitedForOnce) {
  OffloadWorld world(SmallWindows(512 * kKiB), SlowCopies());
  at::Tensor y = world.carrier;
  uint64_t before = 0;
  {
    const OffloadScope scope(world.session());
    for (int i = 0; i < 4; ++i) y = Probe(y, {world.activation(128)}, OffloadWorld::Use);
    at::Tensor large = world.activation(512);
    y = Probe(y, {std::move(large)}, OffloadWorld::Use);
    ASSERT_EQ(world.stats().evicted_bytes, 0u);
    before = world.waits();
  }
  ASSERT_EQ(world.stats().evicted_bytes, 512 * kKiB);
  EXPECT_EQ(world.waits() - before, 2u)
      << "of the large one's copy for compute, and the evictions'";
  y.backward();
}

TEST(OffloadHostCost, WhatBackwardIsDoneWithIsWaitedForOnceHoweverSmallItIs) {
  for (const bool small : {false, true}) {
    SCOPED_TRACE(small ? "one byte" : "64 KiB");
    OffloadWorld world(EverySize(kMiB), SlowCopies());
    const at::Tensor y = InScope(world.session(), world.carrier, [&](at::Tensor& y) {
      for (int i = 0; i < 4; ++i) {
        y = Probe(y, {small ? OneByte(world) : world.activation(64)}, OffloadWorld::Use);
      }
    });
    const uint64_t before = world.waits();
    y.backward();
    EXPECT_EQ(world.stats().reused_on_device, 4u) << world.stats().ToString();
    EXPECT_EQ(world.waits() - before, 1u);
  }
}

TEST(OffloadHostCost, AGroupIsWaitedForOnceHoweverManyTensorsAreReadFromIt) {
  OffloadWorld world(Windows(128 * kKiB, 1), SlowCopies());
  const at::Tensor y = InScope(world.session(), world.carrier, [&](at::Tensor& y) {
    for (int i = 0; i < 16; ++i) y = Probe(y, {world.activation(2)}, OffloadWorld::Use);
  });
  world.session()->FreeDeviceMemory(0);
  const uint64_t before = world.waits();
  y.backward();
  EXPECT_EQ(world.stats().fetched_on_demand, 1u);
  EXPECT_LE(world.waits() - before, 3u)
      << "of the fetch for compute and for the copy out, and of the readers for the fetch";
}

TEST(OffloadHostCost, ADeviceThatCannotBeSetUpIsTriedOnceInAScopeAndLoggedOnce) {
  OffloadWorld world(SmallWindows());
  bool busy = false;
  int tries = 0;
  const auto device = [&](int index) -> absl::StatusOr<std::shared_ptr<Device>> {
    if (!busy) return world.machine().device(index);
    ++tries;
    return absl::UnavailableError("busy");
  };
  const auto session = OffloadSession::Create(SmallWindows(), OwnBackend(device)).value();
  busy = true;
  ::testing::internal::CaptureStderr();
  for (int step = 1; step <= 2; ++step) {
    {
      const OffloadScope scope(session);
      for (int i = 0; i < 5; ++i) Probe(world.carrier, {world.activation(4)}, OffloadWorld::Use);
    }
    EXPECT_EQ(tries, step);
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(session->GetStats().kept_copy_failed, 10u);
  const size_t first = log.find("cannot be set up");
  EXPECT_NE(first, std::string::npos);
  EXPECT_EQ(log.find("cannot be set up", first + 1), std::string::npos);
}

TEST(OffloadHostCost, ATensorThatLeavesAsksOnceInPackAndOnceInUnpackWhetherItsStreamCaptures) {
  constexpr int kTensors = 20;
  OffloadWorld world(SmallWindows());
  const auto device = std::make_shared<ForwardingDevice>(world.machine().device(0));
  const auto session =
      OffloadSession::Create(SmallWindows(64 * kKiB), OwnBackend([&](int) { return device; }))
          .value();
  int queries = 0;
  const at::Tensor y = InScope(session, world.carrier, [&](at::Tensor& y) {
    y = Probe(y, {world.activation(64)}, OffloadWorld::Use);  // sets the device up
    device->FailCalls([&queries](const std::string& call, uint64_t) {
      queries += call == "IsCapturing" ? 1 : 0;
      return absl::OkStatus();
    });
    for (int i = 0; i < kTensors; ++i) {
      y = Probe(y, {world.activation(64)}, OffloadWorld::Use);
    }
    EXPECT_EQ(queries, kTensors);
  });
  EXPECT_GE(session->GetStats().evicted_bytes, kTensors * 63 * kKiB);
  queries = 0;
  y.backward();
  EXPECT_LE(queries, kTensors + 2) << "with the first tensor's, and one at the end of backward";
}

}  // namespace
}  // namespace pinion::testing
