// Checks how much the eviction window and the prefetch window hold.

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/activations/offload_world.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"

namespace pinion::testing {
namespace {

TEST(OffloadWindows, InTheFirstScopeTheyHoldTwoTensorsOfTheSizeThatWasSavedSoFar) {
  OffloadWorld world(SmallWindows(OffloadOptions::kAutoWindow));
  const at::Tensor y = world.Save(std::vector<int64_t>(6, 64));
  EXPECT_EQ(world.stats().offloaded, 6u);
  EXPECT_EQ(world.stats().evicted_bytes, 4 * 64 * kKiB);
}

TEST(OffloadWindows, AnEmptyScopeDoesNotMakeThemForgetTheOneBefore) {
  OffloadWorld world(SmallWindows(OffloadOptions::kAutoWindow));
  world.Save(std::vector<int64_t>(8, 256));
  { const OffloadScope empty(world.session()); }
  const uint64_t before = world.stats().evicted_bytes;
  const at::Tensor y = world.Save(std::vector<int64_t>(8, 32));
  EXPECT_EQ(world.stats().evicted_bytes, before);
}

TEST(OffloadWindows, ATensorAboveThePrefetchWindowIsFetchedAheadAllTheSame) {
  OffloadWorld world(Windows(1, 32 * kKiB));
  world.Save({128, 128, 128}).backward();
  EXPECT_EQ(world.QuietStats().prefetch_hits, 2u);
}

// A fetch without memory dropped them. They are prefetched again, and not counted twice.
TEST(OffloadWindows, PrefetchingGoesOnAfterPrefetchesWereDropped) {
  OffloadWorld world(Windows(1, 2 * 64 * kKiB));
  at::Tensor needed;
  const at::Tensor y = InScope(world.session(), world.carrier, [&](at::Tensor& y) {
    for (int i = 0; i < 4; ++i) y = Probe(y, {world.activation(64)}, OffloadWorld::Use);
    y = Probe(y, {world.activation(64)}, [&](const at::Tensor& grad, const UnpackSaved& unpack) {
      const std::vector<at::Tensor> read = unpack();
      world.LeaveRoom(96 * kKiB);
      needed.backward();
      EXPECT_EQ(world.stats().prefetches_dropped, 2u) << "the test's premise";
      world.LeaveRoom(kMiB);
      return grad;
    });
  });
  {
    const OffloadScope scope(world.session());
    needed = Probe(world.carrier, {world.activation(160)}, Read);
  }
  const uint64_t hits = world.stats().prefetch_hits;
  y.backward();
  EXPECT_EQ(world.QuietStats().prefetch_hits - hits, 3u) << world.stats().ToString();
}

TEST(OffloadWindows, APrefetchThatIsRefusedAfterOneThatWorkedPausesForOneTensorOnly) {
  OffloadWorld world(Windows(1, 64 * kKiB));
  const at::Tensor y = InScope(world.session(), world.carrier, [&](at::Tensor& y) {
    // The last is read first; there is no memory to prefetch the second and the fifth.
    for (const uint64_t room_kib : {1024, 1024, 1024, 32, 1024, 1024, 96}) {
      y = Probe(y, {world.activation(64)},
                [&world, room_kib](const at::Tensor& grad, const UnpackSaved& unpack) {
                  world.LeaveRoom(room_kib * kKiB);
                  unpack();
                  return grad;
                });
    }
  });
  y.backward();
  EXPECT_EQ(world.stats().prefetches_refused, 2u);
  EXPECT_EQ(world.stats().prefetch_hits, 2u) << "the fourth and the seventh";
  EXPECT_EQ(world.stats().fetched_on_demand, 5u) << "the first, those two, and the one after each";
}

TEST(OffloadWindows, ATensorThatIsReadTwiceStandsInForNoOtherOfItsParcel) {
  OffloadWorld world(Windows(1, 1));
  const at::Tensor y = InScope(world.session(), world.carrier, [&](at::Tensor& y) {
    const at::Tensor shared = world.activation(64);
    y = Probe(y, {shared}, OffloadWorld::Use);
    y = Probe(y, {shared}, [](const at::Tensor& grad, const UnpackSaved& unpack) {
      unpack();
      return OffloadWorld::Use(grad, unpack);
    });
  });
  world.session()->FreeDeviceMemory(0);
  y.backward();
  EXPECT_EQ(world.QuietStats().fetched_on_demand, 1u);
}

// A node whose backward reports the device bytes after aliased memory was released.
at::Tensor ProbeWhatIsLeft(OffloadWorld& world, uint64_t* left_bytes) {
  return Probe(world.carrier, {}, [&world, left_bytes](const at::Tensor& grad, const UnpackSaved&) {
    world.session()->FreeDeviceMemory(0);
    *left_bytes = world.device_bytes();
    return grad;
  });
}

// An earlier backward that read part of the graph must not count.
TEST(OffloadWindows, EachBackwardHoldsWhatItFetchesUntilItHasReadAllOfItAndNoLonger) {
  OffloadWorld world(Windows(kMiB, 1));
  uint64_t held_bytes = 0;
  uint64_t left_bytes = 0;
  at::Tensor y;
  at::Tensor part = InScope(world.session(), [&] {
    const at::Tensor shared = world.activation(64);
    y = ProbeWhatIsLeft(world, &left_bytes);
    for (int i = 0; i < 3; ++i) {
      y = Probe(y, {shared}, [&](const at::Tensor& grad, const UnpackSaved& unpack) {
        unpack();
        held_bytes = std::max(held_bytes, world.device_bytes());
        return grad;
      });
    }
    return Probe(world.carrier, {shared}, OffloadWorld::Use);
  });
  ASSERT_EQ(world.stats().shared, 3u);
  world.session()->FreeDeviceMemory(0);
  part.backward({}, /*retain_graph=*/true);
  part.reset();
  ASSERT_TRUE(Soon([&] { return world.stats().live_handles == 3; }));
  for (int backward = 0; backward < 2; ++backward) {
    held_bytes = 0;
    const uint64_t before = world.stats().fetched_on_demand;
    y.backward({}, /*retain_graph=*/true);
    EXPECT_EQ(world.stats().fetched_on_demand - before, 1u);
    EXPECT_EQ(held_bytes - left_bytes, 64 * kKiB);
  }
}
TEST(OffloadWindows, ATensorThatGoesUnreadDoesNotMakeALaterBackwardHoldWhatItHasRead) {
  OffloadWorld world(Windows(kMiB, 1));
  uint64_t left_bytes = 0;
  at::Tensor y;
  at::Tensor unread = InScope(world.session(), [&] {
    const at::Tensor shared = world.activation(64);
    y = ProbeWhatIsLeft(world, &left_bytes);
    y = Probe(y, {shared}, OffloadWorld::Use);
    return Probe(world.carrier, {shared}, OffloadWorld::Use);
  });
  y.backward({}, /*retain_graph=*/true);
  ASSERT_EQ(world.stats().reused_on_device, 1u);
  unread.reset();
  ASSERT_TRUE(Soon([&] { return world.stats().live_handles == 1; }));
  world.session()->FreeDeviceMemory(0);
  const uint64_t before = world.device_bytes();
  y.backward({}, /*retain_graph=*/true);
  ASSERT_EQ(world.stats().fetched_on_demand, 1u);
  EXPECT_LT(left_bytes, before + 32 * kKiB);
}

}  // namespace
}  // namespace pinion::testing
