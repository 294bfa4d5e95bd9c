// Checks what is evicted and when: slices and their storages, a tensor larger than all others,
// groups without memory for gathering.

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
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
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/forwarding_device.h"

namespace pinion::testing {
namespace {

// Logits, for example: a window of twice their size would hold more than all other saved tensors.
TEST(OffloadMemory, OneTensorThatIsLargerThanAllOthersDoesNotWidenTheAutomaticWindow) {
  OffloadWorld world(SmallWindows(OffloadOptions::kAutoWindow));
  std::vector<int64_t> sizes(16, 32);
  sizes[8] = 2048;
  world.Save(sizes);
  const uint64_t before = world.device_bytes();
  const at::Tensor y = world.Save(sizes);
  // A sixteenth of 2,528 KiB, and the small tensors that wait for a batch.
  EXPECT_LE(world.device_bytes() - before, (158 + 40) * kKiB) << world.stats().ToString();
}

TEST(OffloadMemory, TheLargestTensorIsNotWaitedForWhenItIsTheLastOne) {
  OffloadWorld world(SmallWindows(OffloadOptions::kAutoWindow));
  std::vector<int64_t> sizes(16, 32);
  sizes.back() = 2048;
  world.Save(sizes).backward();
  const OffloadStats before = world.QuietStats();
  world.Save(sizes).backward();
  const OffloadStats stats = world.QuietStats();
  EXPECT_GE(stats.reused_on_device, before.reused_on_device + 1);
  EXPECT_LE(stats.fetched_bytes - before.fetched_bytes, 15 * 32 * kKiB);
}

TEST(OffloadMemory, ASmallSliceThatHoldsALargeStorageLeavesAtOnce) {
  OffloadWorld world(SmallWindows(64 * kKiB));
  const uint64_t before = world.device_bytes();
  std::vector<at::Tensor> seen;
  const OffloadScope scope(world.session());
  at::Tensor y = Observe(world.carrier, {world.activation(1024).narrow(0, 512, 512)}, &seen);
  y = Observe(y, {world.activation(2)}, &seen);
  EXPECT_EQ(world.stats().offloaded, 2u);
  EXPECT_LE(world.device_bytes() - before, 16 * kKiB) << world.stats().ToString();
  EXPECT_EQ(world.stats().evicted_bytes, 0u) << "it was gathered: nothing waits for its copy";
  y.backward();
}

// TRL keeps the second view of a storage on the device, so the copy of the first one frees nothing.
TEST(OffloadMemory, AWindowCountsTheWholeStorageOfASliceAndOnceForAllSlices) {
  for (const uint64_t window_kib : {768, 1280}) {
    SCOPED_TRACE(window_kib);
    OffloadWorld world(SmallWindows(window_kib * kKiB));
    at::Tensor whole = world.activation(1024);
    const at::Tensor y = InScope(world.session(), world.carrier, [&](at::Tensor& y) {
      for (int i = 0; i < 4; ++i) {
        y = Probe(y, {whole.narrow(0, i * 64 * 1024, 64 * 1024)}, OffloadWorld::Use);
      }
    });
    whole.reset();
    EXPECT_EQ(world.stats().offloaded, 4u);
    EXPECT_EQ(world.stats().evicted_bytes, window_kib == 768 ? 1024 * kKiB : 0u);
    y.backward();
  }
}

// The remaining slices keep the storage alive for which the freed one was counted.
TEST(OffloadMemory, AStorageCountsUntilItsLastSliceHasGone) {
  OffloadWorld world(SmallWindows(1536 * kKiB));
  at::Tensor whole = world.activation(1024);
  at::Tensor first;
  at::Tensor second;
  at::Tensor later = InScope(world.session(), [&] {
    first = Probe(world.carrier, {whole.narrow(0, 0, 64 * 1024)}, OffloadWorld::Use);
    second = Probe(world.carrier, {whole.narrow(0, 64 * 1024, 64 * 1024)}, OffloadWorld::Use);
    return Probe(world.carrier, {world.activation(32)}, OffloadWorld::Use);
  });
  whole.reset();
  ASSERT_EQ(world.stats().offloaded, 3u);
  second.reset();
  {
    const OffloadScope scope(world.session());
    later = Probe(later, {world.activation(768)}, OffloadWorld::Use);
    later = Probe(later, {world.activation(32)}, OffloadWorld::Use);
  }
  EXPECT_EQ(world.stats().evicted_bytes, 256 * kKiB) << "the first slice";
}

TEST(OffloadMemory, ASliceMayGoWhileAnotherOneOfItsStorageHasNotLeft) {
  OffloadWorld world(SmallWindows(2 * kMiB));
  const at::Tensor whole = world.activation(1024);
  std::vector<at::Tensor> seen;
  at::Tensor second;
  at::Tensor first = InScope(world.session(), [&] {
    return Probe(world.carrier, {whole.narrow(0, 0, 64 * 1024)}, OffloadWorld::Use);
  });
  {
    const OffloadScope scope(world.session());
    second = Observe(world.carrier, {whole.narrow(0, 64 * 1024, 64 * 1024)}, &seen);
    first.reset();
  }
  ASSERT_EQ(world.stats().offloaded, 2u);
  second.backward();
  EXPECT_TRUE(SameBytes(seen[0], ActivationValues(KiB(1024)).narrow(0, 64 * 1024, 64 * 1024)));
}

TEST(OffloadMemory, WithoutOverlapATensorWhoseCopyIsNotKnownToBeDoneStaysOnTheDevice) {
  OffloadWorld world(SmallWindows());
  OffloadOptions options = SmallWindows();
  options.overlap = false;
  const auto failing = std::make_shared<ForwardingDevice>(world.machine().device(0));
  failing->FailCalls([](const std::string& call, uint64_t) {
    return call == "WaitEvent" ? absl::UnavailableError("injected") : absl::OkStatus();
  });
  const std::shared_ptr<Device> device = failing;
  const auto session =
      OffloadSession::Create(options, OwnBackend([device](int) { return device; })).value();
  const at::Tensor y = InScope(
      session, [&] { return Probe(world.carrier, {world.activation(64)}, OffloadWorld::Use); });
  session->FreeDeviceMemory(0);
  EXPECT_EQ(session->GetStats().offloaded, 1u);
  EXPECT_EQ(session->GetStats().evicted_bytes, 0u);
  y.backward();
  EXPECT_EQ(session->GetStats().reused_on_device, 1u);
}

TEST(OffloadMemory, WhatIsSavedFirstLeavesFirstWhetherItIsLargeOrSmall) {
  OffloadWorld world(SmallWindows(50 * kKiB));
  const at::Tensor y = world.Save({4, 48});
  EXPECT_EQ(world.stats().evicted_bytes, 4 * kKiB) << world.stats().ToString();
}

// TRL clones a view on a stream that neither writes the memory nor reuses it (axolotl#3833).
TEST(OffloadMemory, ALargeSliceOfALargerStorageIsCopiedFromWhereItLies) {
  OffloadWorld world(SmallWindows(2 * kMiB));
  at::Tensor y;
  uint64_t kernels = 0;
  {
    const OffloadScope scope(world.session());
    y = Probe(world.carrier, {world.activation(1024).narrow(0, 0, 64 * 1024)}, OffloadWorld::Use);
    world.device_bytes();
    kernels = world.machine().time_stats(0).kernels;
  }
  world.device_bytes();
  EXPECT_EQ(world.stats().offloaded_bytes, 256 * kKiB);
  EXPECT_EQ(world.machine().time_stats(0).kernels, kernels);
}

uint64_t OutOfMemoryErrors(OffloadWorld& world) {
  auto* const allocator =
      dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(world.device().type()));
  return allocator->getDeviceStats(0).num_ooms;
}

// After a failed allocation, LibTorch's CUDA allocator empties its cache.
TEST(OffloadMemory, GathersThatDoNotFitAreTriedLessAndLessOften) {
  OffloadWorld world(SmallWindows(64 * kKiB));
  constexpr int kGroups = 32;
  constexpr int kPerGroup = 8;  // of 2 KiB: a quarter of the window
  std::vector<at::Tensor> activations;
  for (int i = 0; i < kGroups * kPerGroup; ++i) activations.push_back(world.activation(2, i));
  std::vector<at::Tensor> carriers;
  for (size_t i = 0; i < activations.size(); ++i) {
    carriers.push_back(NewCarrier(world));
  }
  const uint64_t before = OutOfMemoryErrors(world);
  std::vector<at::Tensor> nodes;
  {
    const OffloadScope scope(world.session());
    for (size_t i = 0; i < activations.size(); ++i) {
      world.LeaveRoom(8 * kKiB);
      nodes.push_back(Probe(carriers[i], {activations[i]}, OffloadWorld::Use));
    }
  }
  EXPECT_GE(world.stats().groups, static_cast<uint64_t>(kGroups - 1));
  const uint64_t errors = OutOfMemoryErrors(world) - before;
  EXPECT_GE(errors, 1u);
  EXPECT_LE(errors, 6u);  // pauses double: 1, 2, 4, 8, 16 gathers
}

}  // namespace
}  // namespace pinion::testing
