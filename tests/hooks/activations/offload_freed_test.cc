// Checks which device memory FreeDeviceMemory releases immediately, in backward and after it.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>

#include <cstdint>
#include <latch>
#include <thread>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/activations/offload_world.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace {

TEST(OffloadFreed, ATensorOfOneByteIsFreedOnRequestToo) {
  OffloadWorld world(EverySize(1));
  const at::Tensor y = InScope(
      world.session(), [&] { return Probe(world.carrier, {OneByte(world)}, OffloadWorld::Use); });
  ASSERT_EQ(world.stats().evicted_bytes, 0u) << "it is as large as the window";
  world.session()->FreeDeviceMemory(0);
  EXPECT_EQ(world.stats().evicted_bytes, 1u);
}

TEST(OffloadFreed, AnOperatorThatRunsOutInBackwardMayHaveWhatPinionHolds) {
  OffloadWorld world(SmallWindows(kMiB));
  std::vector<at::Tensor> seen;
  bool ran_out = false;
  const at::Tensor y = InScope(world.session(), world.carrier, [&](at::Tensor& y) {
    y = Observe(y, {world.activation(128, 1)}, &seen);
    y = Observe(y, {world.activation(128, 2)}, &seen);
    y = Probe(y, {}, [&](const at::Tensor& grad, const UnpackSaved&) {
      const auto allocate = [&] { at::empty(KiB(200), at::TensorOptions(world.device())); };
      try {
        allocate();
      } catch (const c10::OutOfMemoryError&) {
        ran_out = true;
        world.session()->FreeDeviceMemory(0);
        allocate();
      }
      return grad;
    });
  });
  world.LeaveRoom(16 * kKiB);
  y.backward();
  EXPECT_TRUE(ran_out);
  EXPECT_EQ(world.stats().fetched_bytes, 256 * kKiB);
  EXPECT_TRUE(SameBytes(seen[0], ActivationValues(KiB(128), 1)));
}

TEST(OffloadFreed, UnreadPrefetchesAreFreedOnRequestToo) {
  OffloadWorld world(Windows(1, kMiB));
  uint64_t freed = 0;
  at::Tensor y;
  {
    const OffloadScope scope(world.session());
    y = Probe(world.carrier, {world.activation(128)}, OffloadWorld::Use);
    y = Probe(y, {world.activation(128)}, [&](const at::Tensor& grad, const UnpackSaved& unpack) {
      const std::vector<at::Tensor> read = unpack();
      const uint64_t before = world.device_bytes();
      world.session()->FreeDeviceMemory(0);
      freed = before - world.device_bytes();
      return grad;
    });
  }
  y.backward();
  EXPECT_GE(freed, 128 * kKiB);
  EXPECT_EQ(world.QuietStats().prefetches_dropped, 1u);
}

// Backward keeps half a window for a moment, because D2H copies may be pending.
TEST(OffloadFreed, WhatBackwardIsDoneWithIsFreedOnRequestAtOnce) {
  OffloadWorld world(SmallWindows(kMiB));
  for (int step = 0; step < 2; ++step) {
    uint64_t freed = 0;
    const at::Tensor y = InScope(world.session(), world.carrier, [&](at::Tensor& y) {
      y = Probe(y, {}, [&](const at::Tensor& grad, const UnpackSaved&) {
        const uint64_t before = world.device_bytes();
        world.session()->FreeDeviceMemory(0);
        freed = before - world.device_bytes();
        return grad;
      });
      for (int i = 0; i < 2; ++i) y = Probe(y, {world.activation(256)}, OffloadWorld::Use);
    });
    y.backward();
    EXPECT_EQ(freed, 512 * kKiB);
  }
  EXPECT_EQ(world.stats().offloaded, 4u);
}

// No later end of a backward would free the tensor.
TEST(OffloadFreed, WhatGoesAfterTheEndOfABackwardIsFreedAtOnce) {
  OffloadWorld world(SmallWindows(kMiB));
  at::Tensor other = world.Save({128});
  uint64_t freed = 0;
  const at::Tensor y = InScope(world.session(), [&] {
    return Probe(world.carrier, {world.activation(64)},
                 [&](const at::Tensor& grad, const UnpackSaved& unpack) {
                   unpack();
                   torch::autograd::Engine::get_default_engine().queue_callback([&] {
                     const uint64_t before = world.device_bytes();
                     other.reset();
                     freed = before - world.device_bytes();
                   });
                   return grad;
                 });
  });
  y.backward();
  EXPECT_GE(freed, 128 * kKiB);
}

TEST(OffloadFreed, WhatGoesInABackwardThatHasUnpackedNothingIsFreedAtOnce) {
  OffloadWorld world(SmallWindows(kMiB));
  at::Tensor other = world.Save({128});
  uint64_t freed = 0;
  Probe(world.carrier, {}, [&](const at::Tensor& grad, const UnpackSaved&) {
    const uint64_t before = world.device_bytes();
    other.reset();
    freed = before - world.device_bytes();
    return grad;
  }).backward();
  EXPECT_GE(freed, 128 * kKiB);
}

// Neither a copy nor a kernel reads it, so no wait is needed.
TEST(OffloadFreed, WhatGoesInABackwardBeforeItWasCopiedIsFreedAtOnce) {
  OffloadWorld world(SmallWindows(kMiB));
  uint64_t freed = 0;
  at::Tensor other;
  const at::Tensor y = [&] {
    const OffloadScope scope(world.session());
    return Probe(world.carrier, {world.activation(64)},
                 [&](const at::Tensor& grad, const UnpackSaved& unpack) {
                   unpack();
                   const uint64_t before = world.device_bytes();
                   other.reset();
                   freed = before - world.device_bytes();
                   return grad;
                 });
  }();
  {
    const OffloadScope scope(world.session());
    other = Probe(world.carrier, {world.activation(128)}, OffloadWorld::Use);
    y.backward();
  }
  EXPECT_GE(freed, 128 * kKiB);
}

TEST(OffloadFreed, WhatGoesOutsideOfABackwardIsFreedAtOnceEvenIfItWasUnpackedThere) {
  OffloadWorld world(SmallWindows(kMiB));
  UnpackSaved unpack;
  at::Tensor y = InScope(world.session(), [&] {
    return Probe(world.carrier, {world.activation(128)},
                 [&](const at::Tensor& grad, const UnpackSaved& unpack_in_backward) {
                   unpack = unpack_in_backward;
                   return grad;
                 });
  });
  y.backward({}, /*retain_graph=*/true);
  unpack();
  const uint64_t before = world.device_bytes();
  y.reset();
  EXPECT_TRUE(Soon([&] { return world.stats().live_handles == 0; }));
  EXPECT_GE(before - world.device_bytes(), 128 * kKiB);
}

// An externally referenced leaf stays. A backward that finished with a part of it is no reference.
TEST(OffloadFreed, WhatBackwardIsDoneWithKeepsNoOtherPartOfItsStorage) {
  OffloadWorld world(SmallWindows(4 * kMiB));
  at::Tensor whole = world.activation(1024);
  at::Tensor leaf = whole.detach();
  std::latch saved(1);
  std::latch read(1);
  std::thread other;
  at::Tensor other_y;
  const at::Tensor y = InScope(world.session(), world.carrier, [&](at::Tensor& y) {
    y = Probe(y, {}, [&](const at::Tensor& grad, const UnpackSaved&) {
      read.count_down();
      other.join();
      return grad;
    });
    y = Probe(y, {std::exchange(whole, at::Tensor()).narrow(0, 0, 64 * 1024)},
              [](const at::Tensor& grad, const UnpackSaved&) { return grad; });
    y = Probe(y, {world.activation(64)}, OffloadWorld::Use);
  });
  other = std::thread([&] {
    const OffloadScope scope(world.session());
    other_y = Probe(world.carrier, {std::exchange(leaf, at::Tensor()).narrow(0, 65536, 64 * 1024)},
                    OffloadWorld::Use);
    saved.count_down();
    read.wait();
  });
  saved.wait();
  y.backward();
  EXPECT_EQ(world.stats().offloaded, 3u) << world.stats().ToString();
  EXPECT_EQ(world.stats().kept_held, 0u);
}

}  // namespace
}  // namespace pinion::testing
