// Checks which bytes of a storage are copied, and that bytes of other tensors stay untouched.

#include <ATen/core/Tensor.h>
#include <ATen/ops/mul.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/activations/offload_world.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

TEST(OffloadBytes, ASmallViewComesBackWithTheAlignmentThatItHad) {
  OffloadWorld world(SmallWindows(1));
  std::vector<at::Tensor> seen;
  uint64_t alignment = 0;
  const at::Tensor y = InScope(world.session(), [&] {
    const at::Tensor view = world.activation(64).narrow(0, 1001, 300);
    alignment = reinterpret_cast<uintptr_t>(view.data_ptr()) % 512;
    return Observe(world.carrier, {view}, &seen);
  });
  world.session()->FreeDeviceMemory(0);
  ASSERT_EQ(alignment, 1001u * 4 % 512);
  y.backward();
  EXPECT_EQ(world.stats().fetched_on_demand, 1u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(seen[0].data_ptr()) % 512, alignment);
}

TEST(OffloadBytes, AViewOfHalfOfItsStorageTakesAllOfItAndASmallerOneItselfAlone) {
  OffloadWorld world(SmallWindows(kMiB));
  const OffloadScope scope(world.session());
  const auto offloaded = [&](int64_t kib) {
    const uint64_t before = world.stats().offloaded_bytes;
    Probe(world.carrier, {world.activation(128).narrow(0, 1024, kib * 256)}, OffloadWorld::Use);
    return world.stats().offloaded_bytes - before;
  };
  EXPECT_EQ(offloaded(64), 128 * kKiB);
  EXPECT_EQ(offloaded(63), 63 * kKiB);
}

constexpr uint64_t kBatchWindowBytes = 128 * kKiB;  // 32 KiB of waiting tensors start a copy

TEST(OffloadBytes, OfATensorWhoseSlicesWaitForACopyTheMemoryCountsOnce) {
  OffloadWorld world(SmallWindows(kBatchWindowBytes));
  const OffloadScope scope(world.session());
  const at::Tensor whole = world.activation(24);
  at::Tensor y = world.carrier;
  // The last one's operator may still run. The others make 24 KiB free, and 2 KiB each.
  for (int i = 0; i < 5; ++i) y = Probe(y, {whole.narrow(0, i * 512, 512)}, OffloadWorld::Use);
  const auto copies = [&] { return world.session()->GetEngineStats(0).d2h.submitted_transfers; };
  EXPECT_EQ(copies(), 0u);
  y = Probe(y, {whole.narrow(0, 5 * 512, 512)}, OffloadWorld::Use);
  EXPECT_EQ(copies(), 1u);
}

TEST(OffloadBytes, ASliceOfATensorThatFillsACopyLeavesTheTensorBehindAtOnce) {
  OffloadWorld world(SmallWindows(kBatchWindowBytes));
  const OffloadScope scope(world.session());
  at::Tensor y = world.carrier;
  const uint64_t before = world.device_bytes();
  y = Probe(y, {world.activation(32).narrow(0, 0, 512)}, OffloadWorld::Use);
  EXPECT_GE(world.device_bytes() - before, 32 * kKiB);
  y = Probe(y, {world.activation(2)}, OffloadWorld::Use);  // the first operator has returned
  EXPECT_LT(world.device_bytes() - before, 32 * kKiB);
  EXPECT_EQ(world.stats().evicted_bytes, 0u) << "the slice is in the window";
}

TEST(OffloadBytes, AViewThatGoesBeyondWhatWasSavedBeforeDoesNotShareIt) {
  for (const int64_t begin_kib : {96, 160}) {
    SCOPED_TRACE(begin_kib);
    OffloadWorld world(SmallWindows(1));
    std::vector<at::Tensor> seen_first;
    std::vector<at::Tensor> seen;
    const at::Tensor y = InScope(world.session(), world.carrier, [&](at::Tensor& y) {
      const at::Tensor whole = world.activation(1024);
      y = Observe(y, {whole.narrow(0, 128 * 256, 64 * 256)}, &seen_first);
      y = Observe(y, {whole.narrow(0, begin_kib * 256, 64 * 256)}, &seen);
    });
    y.backward();
    EXPECT_EQ(world.stats().shared, 0u);
    const at::Tensor values = ActivationValues(KiB(1024));
    EXPECT_TRUE(SameBytes(seen.at(0), values.narrow(0, begin_kib * 256, 64 * 256)));
    EXPECT_TRUE(SameBytes(seen_first.at(0), values.narrow(0, 128 * 256, 64 * 256)));
  }
}

TEST(OffloadBytes, OffloadedBytesCountTheOnesBetweenTensorsThatAreGathered) {
  OffloadWorld world(SmallWindows(512 * kKiB));
  constexpr uint64_t kTensors = 40;
  const at::Tensor y = InScope(world.session(), world.carrier, [&](at::Tensor& y) {
    for (uint64_t i = 0; i < kTensors; ++i) {
      y = Probe(y, {Activation(world.carrier, {500})}, OffloadWorld::Use);  // 2,000 bytes
    }
  });
  EXPECT_EQ(world.stats().groups, 1u);
  EXPECT_EQ(world.stats().offloaded_bytes, (kTensors - 1) * 2048 + 2000);
}

TEST(OffloadBytes, OffloadedBytesAreThoseOfTheTensorsWhereTheyAreNotGathered) {
  OffloadWorld world(SmallWindows(512 * kKiB));
  constexpr uint64_t kTensors = 40;
  std::vector<at::Tensor> activations;
  for (uint64_t i = 0; i < kTensors; ++i) {
    activations.push_back(Activation(world.carrier, {500}));  // 2,000 bytes
  }
  std::vector<at::Tensor> nodes;
  {
    const OffloadScope scope(world.session());
    for (const at::Tensor& activation : activations) {
      nodes.push_back(Probe(world.carrier, {activation}, OffloadWorld::Use));
    }
    world.LeaveRoom(kKiB);
  }
  EXPECT_EQ(world.stats().groups, 1u);
  EXPECT_EQ(world.stats().offloaded_bytes, kTensors * 2000);
}

// Only the size or only the address of the storage changes after the save.
TEST(OffloadBytes, AStorageWithAnotherSizeOrAddressIsNotWhatWasSaved) {
  for (const bool size : {false, true}) {
    SCOPED_TRACE(size ? "the size" : "the address");
    OffloadWorld world(SmallWindows(64 * kKiB));
    at::Tensor kept = world.activation(64);
    const at::Tensor y =
        InScope(world.session(), [&] { return Probe(world.carrier, {kept}, OffloadWorld::Use); });
    ASSERT_THAT(world.machine().SynchronizeDevice(0), IsOk());
    c10::StorageImpl* const storage = kept.storage().unsafeGetStorageImpl();
    const at::Tensor other = world.activation(64, 100);
    c10::DataPtr memory;  // of the saved tensor
    if (size) {
      storage->set_nbytes(32 * kKiB);
    } else {
      memory = storage->set_data_ptr(c10::DataPtr(other.data_ptr(), kept.device()));
    }
    y.backward();
    if (size) {
      storage->set_nbytes(64 * kKiB);
    } else {
      storage->set_data_ptr_noswap(std::move(memory));
    }
    EXPECT_EQ(world.QuietStats().fetched_on_demand, 1u) << "the bytes are those in host memory";
    EXPECT_EQ(world.stats().reused_on_device, 0u);
  }
}

// Backward reads one tensor on its own stream and the next on another. The race detector ends the
// process if the bytes are overwritten early.
void ReadOnAnotherStreamAndReuse(OffloadWorld& world) {
  const c10::Stream other = world.NewStream();
  at::Tensor y = InScope(world.session(), world.carrier, [&](at::Tensor& y) {
    y = Probe(y, {world.activation(64)}, [&](const at::Tensor& grad, const UnpackSaved& unpack) {
      const c10::StreamGuard guard(other);
      at::mul(unpack()[0], 2);
      return grad;
    });
    y = Probe(y, {world.activation(64)}, OffloadWorld::Use);
  });
  y.backward();
  y.reset();
  ASSERT_TRUE(Soon([&] { return world.stats().live_handles == 0; }));
  for (int i = 0; i < 8; ++i) world.activation(64, i);
}

TEST(OffloadBytes, MemoryThatAnotherStreamReadsIsNotReusedBeforeItHas) {
  OffloadWorld world(SmallWindows(kMiB));
  ReadOnAnotherStreamAndReuse(world);
  EXPECT_EQ(world.stats().reused_on_device, 2u);
}

TEST(OffloadBytes, MemoryThatWasFetchedAheadIsNotReusedBeforeAnotherStreamHasReadIt) {
  OffloadWorld world(Windows(1, kMiB));
  ReadOnAnotherStreamAndReuse(world);
  EXPECT_EQ(world.stats().prefetch_hits, 1u);
}

// Tensors of two alternating streams are evicted together. The race detector ends the process if
// either stream reuses memory that a copy still reads.
TEST(OffloadBytes, WhatTwoStreamsHaveSavedIsNotReusedBeforeItsCopyIsDone) {
  OffloadWorld world(SmallWindows(kMiB), SlowCopies());
  const c10::Stream other = world.NewStream();
  std::vector<at::Tensor> nodes;
  world.device_bytes();
  for (const bool on_other : {false, true, true, false}) {
    std::optional<c10::StreamGuard> guard;
    if (on_other) guard.emplace(other);
    const OffloadScope scope(world.session());
    nodes.push_back(Probe(world.carrier, {world.activation(64)}, OffloadWorld::Use));
  }
  ASSERT_EQ(world.stats().offloaded, 4u);
  world.session()->FreeDeviceMemory(0);
  ASSERT_EQ(world.stats().evicted_bytes, 4 * 64 * kKiB);
  for (int i = 0; i < 8; ++i) world.activation(64, i);
  {
    const c10::StreamGuard guard(other);
    for (int i = 0; i < 8; ++i) world.activation(64, i);
  }
  world.device_bytes();
}

TEST(OffloadBytes, NothingIsGatheredOnAStreamThatCaptures) {
  OffloadWorld world(SmallWindows(128 * kKiB));
  const StreamHandle stream = world.machine().default_stream(0);
  at::Tensor y = world.carrier;
  uint64_t kernels = 0;
  {
    const OffloadScope scope(world.session());
    for (int i = 0; i < 10; ++i) y = Probe(y, {world.activation(2)}, OffloadWorld::Use);
    world.device_bytes();
    kernels = world.machine().time_stats(0).kernels;
    ASSERT_THAT(world.machine().SetCapturing(stream, true), IsOk());
  }
  ASSERT_THAT(world.machine().SetCapturing(stream, false), IsOk());
  world.device_bytes();
  EXPECT_EQ(world.machine().time_stats(0).kernels, kernels);
  EXPECT_EQ(world.stats().kept_capturing, 10u);
}

}  // namespace
}  // namespace pinion::testing
