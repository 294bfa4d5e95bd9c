// What saved tensors leave behind on the device and in host memory, and what they cost the host:
// all of it counted, none of it timed.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <latch>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/device.h"
#include "pinion/device/device_backend.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/engine/stats/engine_stats.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/emu_fixture.h"
#include "pinion/tests/hooks/probe.h"
#include "pinion/tests/hooks/test_net.h"
#include "pinion/tests/support/forwarding_device.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

// A tensor of so many KiB; 32 and more fill a copy of their own on the link of SmallWindows().
std::vector<int64_t> KiB(int64_t kib) { return {kib * 256}; }

// Copies take so long that nothing is known to be done while a test saves and reads.
EmulatedOptions SlowCopies() {
  EmulatedOptions machine = MachineOptions();
  machine.faults.stall_copies_from = 1;
  machine.faults.stall_ms = 10;
  return machine;
}

class World : public EmuWorld {
 public:
  explicit World(const OffloadOptions& options, const EmulatedOptions& machine = MachineOptions())
      : EmuWorld(machine, options) {}

  OffloadStats stats() { return session()->GetStats(); }
  // Waits of a stream for another one, those included that need no call since the work is done.
  uint64_t waits() {
    const EngineStats engine = session()->GetEngineStats(0);
    return engine.event_waits + engine.event_waits_skipped;
  }
  // Known once everything is done that was submitted.
  uint64_t device_bytes() {
    EXPECT_THAT(machine().SynchronizeDevice(0), IsOk());
    return machine().memory_stats(0).in_use_bytes;
  }
  void LeaveRoom(uint64_t size_bytes) {
    EXPECT_THAT(machine().SetMemoryLimit(0, device_bytes() + size_bytes), IsOk());
  }
  at::Tensor activation(int64_t kib, int first = 0) { return Activation(carrier, KiB(kib), first); }
  // A node for each size in KiB, in a scope of their own.
  at::Tensor Save(const std::vector<int64_t>& kib) {
    const OffloadScope scope(session());
    at::Tensor y = carrier;
    for (const int64_t size : kib) y = Probe(y, {activation(size)}, Use);
    return y;
  }
  static at::Tensor Use(const at::Tensor& grad, const UnpackSaved& unpack) {
    at::mul(unpack()[0], 2);
    return grad;
  }

  at::Tensor carrier = at::ones({1}, at::TensorOptions(device())).requires_grad_(true);
};

// For tensors of one byte.
OffloadOptions EverySize(uint64_t window_bytes) {
  OffloadOptions options = SmallWindows(window_bytes);
  options.min_offload_bytes = 1;
  return options;
}

at::Tensor OneByte(World& world) {
  return at::ones({1}, at::TensorOptions(world.device()).dtype(at::kByte));
}

// --- What stays on the device ---

// Logits, say: twice their size, both ways, would hold more than all that is saved.
TEST(OffloadMemory, OneTensorThatIsLargerThanAllOthersDoesNotWidenTheAutomaticWindow) {
  World world(SmallWindows(OffloadOptions::kAutoWindow));
  std::vector<int64_t> sizes(16, 32);
  sizes[8] = 2048;
  world.Save(sizes);
  const uint64_t before = world.device_bytes();
  const at::Tensor y = world.Save(sizes);
  // A sixteenth of 2,528 KiB, and what waits for company.
  EXPECT_LE(world.device_bytes() - before, (158 + 40) * kKiB) << world.stats().ToString();
}

TEST(OffloadMemory, TheLargestTensorIsNotWaitedForWhenItIsTheLastOne) {
  World world(SmallWindows(OffloadOptions::kAutoWindow));
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
  World world(SmallWindows(64 * kKiB));
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

TEST(OffloadMemory, AWindowCountsTheWholeStorageOfASliceAndOnceForAllSlices) {
  for (const uint64_t window_kib : {768, 1280}) {
    SCOPED_TRACE(window_kib);
    World world(SmallWindows(window_kib * kKiB));
    at::Tensor whole = world.activation(1024);
    at::Tensor y = world.carrier;
    {
      const OffloadScope scope(world.session());
      for (int i = 0; i < 4; ++i) {
        y = Probe(y, {whole.narrow(0, i * 64 * 1024, 64 * 1024)}, World::Use);
      }
    }
    whole.reset();
    EXPECT_EQ(world.stats().offloaded, 4u);
    EXPECT_EQ(world.stats().evicted_bytes, window_kib == 768 ? 1024 * kKiB : 0u);
    y.backward();
  }
}

// The slices that live on hold the storage that the one that went was counted for.
TEST(OffloadMemory, AStorageCountsUntilItsLastSliceHasGone) {
  World world(SmallWindows(1536 * kKiB));
  at::Tensor whole = world.activation(1024);
  at::Tensor first;
  at::Tensor second;
  at::Tensor later;
  {
    const OffloadScope scope(world.session());
    first = Probe(world.carrier, {whole.narrow(0, 0, 64 * 1024)}, World::Use);
    second = Probe(world.carrier, {whole.narrow(0, 64 * 1024, 64 * 1024)}, World::Use);
    later = Probe(world.carrier, {world.activation(32)}, World::Use);
  }
  whole.reset();
  ASSERT_EQ(world.stats().offloaded, 3u);
  second.reset();
  {
    const OffloadScope scope(world.session());
    later = Probe(later, {world.activation(768)}, World::Use);
    later = Probe(later, {world.activation(32)}, World::Use);
  }
  EXPECT_EQ(world.stats().evicted_bytes, 256 * kKiB) << "the first slice";
}

TEST(OffloadMemory, ASliceMayGoWhileAnotherOneOfItsStorageHasNotLeft) {
  World world(SmallWindows(2 * kMiB));
  const at::Tensor whole = world.activation(1024);
  std::vector<at::Tensor> seen;
  at::Tensor first;
  at::Tensor second;
  {
    const OffloadScope scope(world.session());
    first = Probe(world.carrier, {whole.narrow(0, 0, 64 * 1024)}, World::Use);
  }
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
  World world(SmallWindows());
  OffloadOptions options = SmallWindows();
  options.overlap = false;
  const auto failing = std::make_shared<ForwardingDevice>(world.machine().device(0));
  failing->FailCalls([](const std::string& call, uint64_t) {
    return call == "WaitEvent" ? absl::UnavailableError("injected") : absl::OkStatus();
  });
  const std::shared_ptr<Device> device = failing;
  const auto session =
      OffloadSession::Create(options, {"emu", [device](int) { return device; }}).value();
  at::Tensor y;
  {
    const OffloadScope scope(session);
    y = Probe(world.carrier, {world.activation(64)}, World::Use);
  }
  session->FreeDeviceMemory(0);
  EXPECT_EQ(session->GetStats().offloaded, 1u);
  EXPECT_EQ(session->GetStats().evicted_bytes, 0u);
  y.backward();
  EXPECT_EQ(session->GetStats().reused_on_device, 1u);
}

TEST(OffloadMemory, WhatIsSavedFirstLeavesFirstWhetherItIsLargeOrSmall) {
  World world(SmallWindows(50 * kKiB));
  const at::Tensor y = world.Save({4, 48});
  EXPECT_EQ(world.stats().evicted_bytes, 4 * kKiB) << world.stats().ToString();
}

TEST(OffloadMemory, ALargeSliceOfALargerStorageIsCopiedFromWhereItLies) {
  World world(SmallWindows(2 * kMiB));
  at::Tensor y;
  uint64_t kernels = 0;
  {
    const OffloadScope scope(world.session());
    y = Probe(world.carrier, {world.activation(1024).narrow(0, 0, 64 * 1024)}, World::Use);
    world.device_bytes();
    kernels = world.machine().time_stats(0).kernels;
  }
  world.device_bytes();
  EXPECT_EQ(world.stats().offloaded_bytes, 256 * kKiB);
  EXPECT_EQ(world.machine().time_stats(0).kernels, kernels);
}

TEST(OffloadMemory, ATensorOfOneByteIsFreedOnRequestToo) {
  World world(EverySize(1));
  at::Tensor y;
  {
    const OffloadScope scope(world.session());
    y = Probe(world.carrier, {OneByte(world)}, World::Use);
  }
  ASSERT_EQ(world.stats().evicted_bytes, 0u) << "it is as large as the window";
  world.session()->FreeDeviceMemory(0);
  EXPECT_EQ(world.stats().evicted_bytes, 1u);
}

TEST(OffloadMemory, AnOperatorThatRunsOutInBackwardMayHaveWhatPinionHolds) {
  World world(SmallWindows(kMiB));
  std::vector<at::Tensor> seen;
  bool ran_out = false;
  at::Tensor y;
  {
    const OffloadScope scope(world.session());
    y = Observe(world.carrier, {world.activation(128, 1)}, &seen);
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
  }
  world.LeaveRoom(16 * kKiB);
  y.backward();
  EXPECT_TRUE(ran_out);
  EXPECT_EQ(world.stats().fetched_bytes, 256 * kKiB);
  EXPECT_TRUE(SameBytes(seen[0], ActivationValues(KiB(128), 1)));
}

TEST(OffloadMemory, UnreadPrefetchesAreFreedOnRequestToo) {
  OffloadOptions options = SmallWindows(1);
  options.prefetch_window_bytes = kMiB;
  World world(options);
  uint64_t freed = 0;
  at::Tensor y;
  {
    const OffloadScope scope(world.session());
    y = Probe(world.carrier, {world.activation(128)}, World::Use);
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

// Backward keeps half a window for a moment, because copies out may not be done.
TEST(OffloadMemory, WhatBackwardIsDoneWithIsFreedOnRequestAtOnce) {
  World world(SmallWindows(kMiB));
  for (int step = 0; step < 2; ++step) {
    uint64_t freed = 0;
    at::Tensor y;
    {
      const OffloadScope scope(world.session());
      y = Probe(world.carrier, {}, [&](const at::Tensor& grad, const UnpackSaved&) {
        const uint64_t before = world.device_bytes();
        world.session()->FreeDeviceMemory(0);
        freed = before - world.device_bytes();
        return grad;
      });
      for (int i = 0; i < 2; ++i) y = Probe(y, {world.activation(256)}, World::Use);
    }
    y.backward();
    EXPECT_EQ(freed, 512 * kKiB);
  }
  EXPECT_EQ(world.stats().offloaded, 4u);
}

// Nothing would end once more, or ever, for it to wait for.
TEST(OffloadMemory, WhatGoesAfterTheEndOfABackwardIsFreedAtOnce) {
  World world(SmallWindows(kMiB));
  at::Tensor other = world.Save({128});
  uint64_t freed = 0;
  at::Tensor y;
  {
    const OffloadScope scope(world.session());
    y = Probe(world.carrier, {world.activation(64)},
              [&](const at::Tensor& grad, const UnpackSaved& unpack) {
                unpack();
                torch::autograd::Engine::get_default_engine().queue_callback([&] {
                  const uint64_t before = world.device_bytes();
                  other.reset();
                  freed = before - world.device_bytes();
                });
                return grad;
              });
  }
  y.backward();
  EXPECT_GE(freed, 128 * kKiB);
}

TEST(OffloadMemory, WhatGoesInABackwardThatHasUnpackedNothingIsFreedAtOnce) {
  World world(SmallWindows(kMiB));
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

// Nothing reads it, so nothing is to be waited for.
TEST(OffloadMemory, WhatGoesInABackwardBeforeItWasCopiedIsFreedAtOnce) {
  World world(SmallWindows(kMiB));
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
    other = Probe(world.carrier, {world.activation(128)}, World::Use);
    y.backward();
  }
  EXPECT_GE(freed, 128 * kKiB);
}

TEST(OffloadMemory, WhatGoesOutsideOfABackwardIsFreedAtOnceEvenIfItWasUnpackedThere) {
  World world(SmallWindows(kMiB));
  UnpackSaved unpack;
  at::Tensor y;
  {
    const OffloadScope scope(world.session());
    y = Probe(world.carrier, {world.activation(128)},
              [&](const at::Tensor& grad, const UnpackSaved& unpack_in_backward) {
                unpack = unpack_in_backward;
                return grad;
              });
  }
  y.backward({}, /*retain_graph=*/true);
  unpack();
  const uint64_t before = world.device_bytes();
  y.reset();
  EXPECT_TRUE(Soon([&] { return world.stats().live_handles == 0; }));
  EXPECT_GE(before - world.device_bytes(), 128 * kKiB);
}

// A leaf stays if somebody holds it: a backward that is done with a part of it does not count.
TEST(OffloadMemory, WhatBackwardIsDoneWithKeepsNoOtherPartOfItsStorage) {
  World world(SmallWindows(4 * kMiB));
  at::Tensor whole = world.activation(1024);
  at::Tensor leaf = whole.detach();
  std::latch saved(1);
  std::latch read(1);
  std::thread other;
  at::Tensor y;
  at::Tensor other_y;
  {
    const OffloadScope scope(world.session());
    y = Probe(world.carrier, {}, [&](const at::Tensor& grad, const UnpackSaved&) {
      read.count_down();
      other.join();
      return grad;
    });
    y = Probe(y, {std::exchange(whole, at::Tensor()).narrow(0, 0, 64 * 1024)},
              [](const at::Tensor& grad, const UnpackSaved&) { return grad; });
    y = Probe(y, {world.activation(64)}, World::Use);
  }
  other = std::thread([&] {
    const OffloadScope scope(world.session());
    other_y = Probe(world.carrier, {std::exchange(leaf, at::Tensor()).narrow(0, 65536, 64 * 1024)},
                    World::Use);
    saved.count_down();
    read.wait();
  });
  saved.wait();
  y.backward();
  EXPECT_EQ(world.stats().offloaded, 3u) << world.stats().ToString();
  EXPECT_EQ(world.stats().kept_held, 0u);
}

uint64_t OutOfMemoryErrors(World& world) {
  auto* const allocator =
      dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(world.device().type()));
  return allocator->getDeviceStats(0).num_ooms;
}

// An allocation that fails makes LibTorch's allocator for CUDA give its cache back.
TEST(OffloadMemory, GathersThatDoNotFitAreTriedLessAndLessOften) {
  World world(SmallWindows(64 * kKiB));
  constexpr int kGroups = 32;
  constexpr int kPerGroup = 8;  // of 2 KiB: a quarter of the window
  std::vector<at::Tensor> activations;
  for (int i = 0; i < kGroups * kPerGroup; ++i) activations.push_back(world.activation(2, i));
  std::vector<at::Tensor> carriers;
  for (size_t i = 0; i < activations.size(); ++i) {
    carriers.push_back(at::ones({1}, at::TensorOptions(world.device())).requires_grad_(true));
  }
  const uint64_t before = OutOfMemoryErrors(world);
  std::vector<at::Tensor> nodes;
  {
    const OffloadScope scope(world.session());
    for (size_t i = 0; i < activations.size(); ++i) {
      world.LeaveRoom(8 * kKiB);
      nodes.push_back(Probe(carriers[i], {activations[i]}, World::Use));
    }
  }
  EXPECT_GE(world.stats().groups, static_cast<uint64_t>(kGroups - 1));
  const uint64_t errors = OutOfMemoryErrors(world) - before;
  EXPECT_GE(errors, 1u);
  EXPECT_LE(errors, 6u);  // each pause is twice as long: 1, 2, 4, 8, 16 gathers
}

// --- Host memory ---

TEST(OffloadMemory, WhatIsReservedIsNotPinnedInForward) {
  World world(SmallWindows());
  ASSERT_THAT(world.session()->Reserve(0, 4 * kMiB), IsOk());
  const uint64_t pinned = world.machine().calls(DeviceCall::kPin);
  ASSERT_GT(pinned, 0u);
  const at::Tensor y = world.Save(std::vector<int64_t>(40, 64));
  EXPECT_GE(world.stats().offloaded_bytes, 2 * kMiB);
  EXPECT_EQ(world.machine().calls(DeviceCall::kPin), pinned);
}

TEST(OffloadMemory, AReserveForADeviceThatThereIsNotIsAnError) {
  World world(SmallWindows());
  EXPECT_FALSE(world.session()->Reserve(7, kMiB).ok());
}

TEST(OffloadMemory, AReserveThatFailsOnceIsTriedAgainAndDisturbsNoScope) {
  World world(SmallWindows());
  bool fails = false;
  const DeviceBackend backend = {"emu", [&](int index) -> absl::StatusOr<std::shared_ptr<Device>> {
                                   if (fails) return absl::UnavailableError("not now");
                                   return world.machine().device(index);
                                 }};
  const auto session = OffloadSession::Create(SmallWindows(1), backend).value();
  fails = true;
  EXPECT_THAT(session->Reserve(0, kMiB), StatusIs(absl::StatusCode::kUnavailable));
  fails = false;
  {
    const OffloadScope scope(session);
    Probe(world.carrier, {world.activation(64)}, World::Use);
  }
  EXPECT_EQ(session->GetStats().offloaded, 1u);
  EXPECT_THAT(session->Reserve(0, kMiB), IsOk());
}

TEST(OffloadMemory, AReserveOpensADeviceThatIsInUseNoMore) {
  World world(SmallWindows());
  int opened = 0;
  const DeviceBackend backend = {"emu", [&](int index) -> absl::StatusOr<std::shared_ptr<Device>> {
                                   ++opened;
                                   return world.machine().device(index);
                                 }};
  const auto session = OffloadSession::Create(SmallWindows(), backend).value();
  ASSERT_THAT(session->Reserve(0, kMiB), IsOk());
  const int before = opened;
  EXPECT_THAT(session->Reserve(0, kMiB), IsOk());
  EXPECT_EQ(opened, before);
}

TEST(OffloadMemory, ATrimGivesBackWhatIsReservedAndBeforeThatNothing) {
  World world(SmallWindows());
  EXPECT_EQ(world.session()->Trim(0).value(), 0u);
  ASSERT_THAT(world.session()->Reserve(0, 4 * kMiB), IsOk());
  const uint64_t reserved = world.session()->GetAllocatorStats().cached_bytes.current;
  EXPECT_GE(reserved, 4 * kMiB);
  EXPECT_EQ(world.session()->Trim(0).value(), reserved);
}

// --- What it costs the host ---

TEST(OffloadHostCost, TheTimeInPackAndUnpackIsCounted) {
  World world(SmallWindows());
  const at::Tensor y = world.Save({64});
  const double pack_us = world.stats().pack_unpack_us;
  EXPECT_GT(pack_us, 0);
  y.backward();
  EXPECT_GT(world.stats().pack_unpack_us, pack_us);
}

TEST(OffloadHostCost, TensorsThatFillAQuarterOfTheWindowTravelTogetherBothWays) {
  World world(SmallWindows(512 * kKiB));
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
    OffloadOptions options = SmallWindows(away ? 1 : 32 * kMiB);
    options.prefetch_window_bytes = 64 * kKiB;
    World world(options);
    world.Save(std::vector<int64_t>(kTensors, 32)).backward();
    const OffloadStats stats = world.QuietStats();
    ASSERT_EQ(stats.reused_on_device, away ? 0u : static_cast<uint64_t>(kTensors));
    EXPECT_EQ(stats.fetched_bytes, away ? kTensors * 32 * kKiB : 0u);
    EXPECT_GE(stats.prefetch_looks, kTensors - 1u);
    EXPECT_LE(stats.prefetch_looks, 3u * kTensors);
  }
}

TEST(OffloadHostCost, ABackwardInsideAnotherFetchesNothingAheadThatIsThere) {
  OffloadOptions options = SmallWindows(1);
  options.prefetch_window_bytes = kMiB;
  World world(options);
  at::Tensor y;
  {
    const OffloadScope scope(world.session());
    y = Probe(world.carrier, {world.activation(64)}, World::Use);
    const at::Tensor inner = Probe(world.carrier, {world.activation(64)}, World::Use);
    y = Probe(y, {world.activation(64)},
              [inner](const at::Tensor& grad, const UnpackSaved& unpack) {
                unpack();
                inner.backward();
                return grad;
              });
  }
  y.backward();
  EXPECT_EQ(world.stats().prefetch_hits, 2u);
  EXPECT_EQ(world.stats().fetched_bytes, 3 * 64 * kKiB);
}

TEST(OffloadHostCost, ParcelsThatAreEvictedTogetherAreWaitedForOnce) {
  World world(SmallWindows(512 * kKiB), SlowCopies());
  at::Tensor y = world.carrier;
  uint64_t before = 0;
  {
    const OffloadScope scope(world.session());
    for (int i = 0; i < 4; ++i) y = Probe(y, {world.activation(128)}, World::Use);
    at::Tensor large = world.activation(512);
    y = Probe(y, {std::move(large)}, World::Use);
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
    World world(EverySize(kMiB), SlowCopies());
    at::Tensor y = world.carrier;
    {
      const OffloadScope scope(world.session());
      for (int i = 0; i < 4; ++i) {
        y = Probe(y, {small ? OneByte(world) : world.activation(64)}, World::Use);
      }
    }
    const uint64_t before = world.waits();
    y.backward();
    EXPECT_EQ(world.stats().reused_on_device, 4u) << world.stats().ToString();
    EXPECT_EQ(world.waits() - before, 1u);
  }
}

TEST(OffloadHostCost, AGroupIsWaitedForOnceHoweverManyTensorsAreReadFromIt) {
  OffloadOptions options = SmallWindows(128 * kKiB);
  options.prefetch_window_bytes = 1;
  World world(options, SlowCopies());
  at::Tensor y = world.carrier;
  {
    const OffloadScope scope(world.session());
    for (int i = 0; i < 16; ++i) y = Probe(y, {world.activation(2)}, World::Use);
  }
  world.session()->FreeDeviceMemory(0);
  const uint64_t before = world.waits();
  y.backward();
  EXPECT_EQ(world.stats().fetched_on_demand, 1u);
  EXPECT_LE(world.waits() - before, 3u)
      << "of the fetch for compute and for the copy out, and of the readers for the fetch";
}

TEST(OffloadHostCost, ADeviceThatCannotBeSetUpIsTriedOnceInAScopeAndLoggedOnce) {
  World world(SmallWindows());
  bool busy = false;
  int tries = 0;
  const auto device = [&](int index) -> absl::StatusOr<std::shared_ptr<Device>> {
    if (!busy) return world.machine().device(index);
    ++tries;
    return absl::UnavailableError("busy");
  };
  const auto session = OffloadSession::Create(SmallWindows(), {"emu", device}).value();
  busy = true;
  ::testing::internal::CaptureStderr();
  for (int step = 1; step <= 2; ++step) {
    {
      const OffloadScope scope(session);
      for (int i = 0; i < 5; ++i) Probe(world.carrier, {world.activation(4)}, World::Use);
    }
    EXPECT_EQ(tries, step);
  }
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(session->GetStats().kept_copy_failed, 10u);
  const size_t first = log.find("cannot be set up");
  EXPECT_NE(first, std::string::npos);
  EXPECT_EQ(log.find("cannot be set up", first + 1), std::string::npos);
}

// --- Windows ---

TEST(OffloadWindows, InTheFirstScopeTheyHoldTwoTensorsOfTheSizeThatWasSavedSoFar) {
  World world(SmallWindows(OffloadOptions::kAutoWindow));
  const at::Tensor y = world.Save(std::vector<int64_t>(6, 64));
  EXPECT_EQ(world.stats().offloaded, 6u);
  EXPECT_EQ(world.stats().evicted_bytes, 4 * 64 * kKiB);
}

TEST(OffloadWindows, AnEmptyScopeDoesNotMakeThemForgetTheOneBefore) {
  World world(SmallWindows(OffloadOptions::kAutoWindow));
  world.Save(std::vector<int64_t>(8, 256));
  { const OffloadScope empty(world.session()); }
  const uint64_t before = world.stats().evicted_bytes;
  const at::Tensor y = world.Save(std::vector<int64_t>(8, 32));
  EXPECT_EQ(world.stats().evicted_bytes, before);
}

TEST(OffloadWindows, ATensorAboveThePrefetchWindowIsFetchedAheadAllTheSame) {
  OffloadOptions options = SmallWindows(1);
  options.prefetch_window_bytes = 32 * kKiB;
  World world(options);
  world.Save({128, 128, 128}).backward();
  EXPECT_EQ(world.QuietStats().prefetch_hits, 2u);
}

// A fetch that found no memory has dropped them; they are fetched ahead again, and count no more.
TEST(OffloadWindows, PrefetchingGoesOnAfterPrefetchesWereDropped) {
  OffloadOptions options = SmallWindows(1);
  options.prefetch_window_bytes = 2 * 64 * kKiB;
  World world(options);
  at::Tensor needed;
  at::Tensor y = world.carrier;
  {
    const OffloadScope scope(world.session());
    for (int i = 0; i < 4; ++i) y = Probe(y, {world.activation(64)}, World::Use);
    y = Probe(y, {world.activation(64)}, [&](const at::Tensor& grad, const UnpackSaved& unpack) {
      const std::vector<at::Tensor> read = unpack();
      world.LeaveRoom(96 * kKiB);
      needed.backward();
      EXPECT_EQ(world.stats().prefetches_dropped, 2u) << "the test's premise";
      world.LeaveRoom(kMiB);
      return grad;
    });
  }
  {
    const OffloadScope scope(world.session());
    needed = Probe(world.carrier, {world.activation(160)},
                   [](const at::Tensor& grad, const UnpackSaved& unpack) {
                     unpack();
                     return grad;
                   });
  }
  const uint64_t hits = world.stats().prefetch_hits;
  y.backward();
  EXPECT_EQ(world.QuietStats().prefetch_hits - hits, 3u) << world.stats().ToString();
}

TEST(OffloadWindows, APrefetchThatIsRefusedAfterOneThatWorkedPausesForOneTensorOnly) {
  OffloadOptions options = SmallWindows(1);
  options.prefetch_window_bytes = 64 * kKiB;
  World world(options);
  at::Tensor y = world.carrier;
  {
    const OffloadScope scope(world.session());
    // The last is read first: there is no room to fetch the second and the fifth ahead.
    for (const uint64_t room_kib : {1024, 1024, 1024, 32, 1024, 1024, 96}) {
      y = Probe(y, {world.activation(64)},
                [&world, room_kib](const at::Tensor& grad, const UnpackSaved& unpack) {
                  world.LeaveRoom(room_kib * kKiB);
                  unpack();
                  return grad;
                });
    }
  }
  y.backward();
  EXPECT_EQ(world.stats().prefetches_refused, 2u);
  EXPECT_EQ(world.stats().prefetch_hits, 2u) << "the fourth and the seventh";
  EXPECT_EQ(world.stats().fetched_on_demand, 5u) << "the first, those two, and the one after each";
}

TEST(OffloadWindows, ATensorThatIsReadTwiceStandsInForNoOtherOfItsParcel) {
  OffloadOptions options = SmallWindows(1);
  options.prefetch_window_bytes = 1;
  World world(options);
  at::Tensor y;
  {
    const OffloadScope scope(world.session());
    const at::Tensor shared = world.activation(64);
    y = Probe(world.carrier, {shared}, World::Use);
    y = Probe(y, {shared}, [](const at::Tensor& grad, const UnpackSaved& unpack) {
      unpack();
      return World::Use(grad, unpack);
    });
  }
  world.session()->FreeDeviceMemory(0);
  y.backward();
  EXPECT_EQ(world.QuietStats().fetched_on_demand, 1u);
}

// A backward that has read a part of it counts for nothing later.
TEST(OffloadWindows, EachBackwardHoldsWhatItFetchesUntilItHasReadAllOfItAndNoLonger) {
  OffloadOptions options = SmallWindows(kMiB);
  options.prefetch_window_bytes = 1;
  World world(options);
  uint64_t held_bytes = 0;
  uint64_t left_bytes = 0;
  at::Tensor y;
  at::Tensor part;
  {
    const OffloadScope scope(world.session());
    const at::Tensor shared = world.activation(64);
    y = Probe(world.carrier, {}, [&](const at::Tensor& grad, const UnpackSaved&) {
      world.session()->FreeDeviceMemory(0);  // what was lent comes back
      left_bytes = world.device_bytes();
      return grad;
    });
    for (int i = 0; i < 3; ++i) {
      y = Probe(y, {shared}, [&](const at::Tensor& grad, const UnpackSaved& unpack) {
        unpack();
        held_bytes = std::max(held_bytes, world.device_bytes());
        return grad;
      });
    }
    part = Probe(world.carrier, {shared}, World::Use);
  }
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

// --- What comes back ---

TEST(OffloadBytes, ASmallViewComesBackWithTheAlignmentThatItHad) {
  World world(SmallWindows(1));
  std::vector<at::Tensor> seen;
  at::Tensor y;
  uint64_t alignment = 0;
  {
    const OffloadScope scope(world.session());
    const at::Tensor view = world.activation(64).narrow(0, 1001, 300);
    alignment = reinterpret_cast<uintptr_t>(view.data_ptr()) % 512;
    y = Observe(world.carrier, {view}, &seen);
  }
  world.session()->FreeDeviceMemory(0);
  ASSERT_EQ(alignment, 1001u * 4 % 512);
  y.backward();
  EXPECT_EQ(world.stats().fetched_on_demand, 1u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(seen[0].data_ptr()) % 512, alignment);
}

TEST(OffloadBytes, AViewOfHalfOfItsStorageTakesAllOfItAndASmallerOneItselfAlone) {
  World world(SmallWindows(kMiB));
  const OffloadScope scope(world.session());
  const auto offloaded = [&](int64_t kib) {
    const uint64_t before = world.stats().offloaded_bytes;
    Probe(world.carrier, {world.activation(128).narrow(0, 1024, kib * 256)}, World::Use);
    return world.stats().offloaded_bytes - before;
  };
  EXPECT_EQ(offloaded(64), 128 * kKiB);
  EXPECT_EQ(offloaded(63), 63 * kKiB);
}

TEST(OffloadWindows, ATensorThatGoesUnreadDoesNotMakeALaterBackwardHoldWhatItHasRead) {
  OffloadOptions options = SmallWindows(kMiB);
  options.prefetch_window_bytes = 1;
  World world(options);
  uint64_t left_bytes = 0;
  at::Tensor y;
  at::Tensor unread;
  {
    const OffloadScope scope(world.session());
    const at::Tensor shared = world.activation(64);
    y = Probe(world.carrier, {}, [&](const at::Tensor& grad, const UnpackSaved&) {
      world.session()->FreeDeviceMemory(0);  // what was lent comes back
      left_bytes = world.device_bytes();
      return grad;
    });
    y = Probe(y, {shared}, World::Use);
    unread = Probe(world.carrier, {shared}, World::Use);
  }
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

TEST(OffloadBytes, AViewThatGoesBeyondWhatWasSavedBeforeDoesNotShareIt) {
  for (const int64_t begin_kib : {96, 160}) {
    SCOPED_TRACE(begin_kib);
    World world(SmallWindows(1));
    std::vector<at::Tensor> seen_first;
    std::vector<at::Tensor> seen;
    at::Tensor y;
    {
      const OffloadScope scope(world.session());
      const at::Tensor whole = world.activation(1024);
      y = Observe(world.carrier, {whole.narrow(0, 128 * 256, 64 * 256)}, &seen_first);
      y = Observe(y, {whole.narrow(0, begin_kib * 256, 64 * 256)}, &seen);
    }
    y.backward();
    EXPECT_EQ(world.stats().shared, 0u);
    const at::Tensor values = ActivationValues(KiB(1024));
    EXPECT_TRUE(SameBytes(seen.at(0), values.narrow(0, begin_kib * 256, 64 * 256)));
    EXPECT_TRUE(SameBytes(seen_first.at(0), values.narrow(0, 128 * 256, 64 * 256)));
  }
}

TEST(OffloadBytes, OffloadedBytesCountTheOnesBetweenTensorsThatAreGathered) {
  World world(SmallWindows(512 * kKiB));
  constexpr uint64_t kTensors = 40;
  at::Tensor y = world.carrier;
  {
    const OffloadScope scope(world.session());
    for (uint64_t i = 0; i < kTensors; ++i) {
      y = Probe(y, {Activation(world.carrier, {500})}, World::Use);  // 2,000 bytes
    }
  }
  EXPECT_EQ(world.stats().groups, 1u);
  EXPECT_EQ(world.stats().offloaded_bytes, (kTensors - 1) * 2048 + 2000);
}

TEST(OffloadBytes, OffloadedBytesAreThoseOfTheTensorsWhereTheyAreNotGathered) {
  World world(SmallWindows(512 * kKiB));
  constexpr uint64_t kTensors = 40;
  std::vector<at::Tensor> activations;
  for (uint64_t i = 0; i < kTensors; ++i) {
    activations.push_back(Activation(world.carrier, {500}));  // 2,000 bytes
  }
  std::vector<at::Tensor> nodes;
  {
    const OffloadScope scope(world.session());
    for (const at::Tensor& activation : activations) {
      nodes.push_back(Probe(world.carrier, {activation}, World::Use));
    }
    world.LeaveRoom(kKiB);
  }
  EXPECT_EQ(world.stats().groups, 1u);
  EXPECT_EQ(world.stats().offloaded_bytes, kTensors * 2000);
}

// Only the size, or only the address, of what is saved is another one.
TEST(OffloadBytes, AStorageWithAnotherSizeOrAddressIsNotWhatWasSaved) {
  for (const bool size : {false, true}) {
    SCOPED_TRACE(size ? "the size" : "the address");
    World world(SmallWindows(64 * kKiB));
    at::Tensor kept = world.activation(64);
    at::Tensor y;
    {
      const OffloadScope scope(world.session());
      y = Probe(world.carrier, {kept}, World::Use);
    }
    ASSERT_THAT(world.machine().SynchronizeDevice(0), IsOk());
    c10::StorageImpl* const storage = kept.storage().unsafeGetStorageImpl();
    const at::Tensor other = world.activation(64, 100);
    c10::DataPtr memory;  // what was saved
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

// Backward reads a tensor on its own stream and then one on another, whose bytes the race detector
// would see overwritten: it ends the process.
void ReadOnAnotherStreamAndReuse(World& world) {
  const c10::Stream other = world.NewStream();
  at::Tensor y;
  {
    const OffloadScope scope(world.session());
    y = Probe(world.carrier, {world.activation(64)},
              [&](const at::Tensor& grad, const UnpackSaved& unpack) {
                const c10::StreamGuard guard(other);
                at::mul(unpack()[0], 2);
                return grad;
              });
    y = Probe(y, {world.activation(64)}, World::Use);
  }
  y.backward();
  y.reset();
  ASSERT_TRUE(Soon([&] { return world.stats().live_handles == 0; }));
  for (int i = 0; i < 8; ++i) world.activation(64, i);
}

TEST(OffloadBytes, MemoryThatAnotherStreamReadsIsNotReusedBeforeItHas) {
  World world(SmallWindows(kMiB));
  ReadOnAnotherStreamAndReuse(world);
  EXPECT_EQ(world.stats().reused_on_device, 2u);
}

TEST(OffloadBytes, MemoryThatWasFetchedAheadIsNotReusedBeforeAnotherStreamHasReadIt) {
  OffloadOptions options = SmallWindows(1);
  options.prefetch_window_bytes = kMiB;
  World world(options);
  ReadOnAnotherStreamAndReuse(world);
  EXPECT_EQ(world.stats().prefetch_hits, 1u);
}

// What is evicted together, of two streams in turns, goes back to its own stream after its own
// copy: the race detector ends the process if either stream reuses what a copy still reads.
TEST(OffloadBytes, WhatTwoStreamsHaveSavedIsNotReusedBeforeItsCopyIsDone) {
  World world(SmallWindows(kMiB), SlowCopies());
  const c10::Stream other = world.NewStream();
  std::vector<at::Tensor> nodes;
  world.device_bytes();
  for (const bool on_other : {false, true, true, false}) {
    std::optional<c10::StreamGuard> guard;
    if (on_other) guard.emplace(other);
    const OffloadScope scope(world.session());
    nodes.push_back(Probe(world.carrier, {world.activation(64)}, World::Use));
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
  World world(SmallWindows(128 * kKiB));
  const StreamHandle stream = world.machine().default_stream(0);
  at::Tensor y = world.carrier;
  uint64_t kernels = 0;
  {
    const OffloadScope scope(world.session());
    for (int i = 0; i < 10; ++i) y = Probe(y, {world.activation(2)}, World::Use);
    world.device_bytes();
    kernels = world.machine().time_stats(0).kernels;
    ASSERT_THAT(world.machine().SetCapturing(stream, true), IsOk());
  }
  ASSERT_THAT(world.machine().SetCapturing(stream, false), IsOk());
  world.device_bytes();
  EXPECT_EQ(world.machine().time_stats(0).kernels, kernels);
  EXPECT_EQ(world.stats().kept_capturing, 10u);
}

// --- While a copy is submitted ---

// Runs `act` when the number-th copy is about to be submitted.
class ActingDevice : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;

  absl::Status CopyAsync(CopyDirection direction, absl::Span<const CopyPiece> pieces,
                         StreamHandle stream) override {
    if (direction == direction_ && --copies_ == 0) std::exchange(act_, nullptr)();
    return ForwardingDevice::CopyAsync(direction, pieces, stream);
  }

  void ActAtCopy(CopyDirection direction, int number, std::function<void()> act) {
    direction_ = direction;
    copies_ = number;
    act_ = std::move(act);
  }

 private:
  CopyDirection direction_ = CopyDirection::kHostToDevice;
  int copies_ = 0;
  std::function<void()> act_;
};

class OffloadMeanwhile : public ::testing::Test {
 protected:
  std::shared_ptr<OffloadSession> NewSession(const OffloadOptions& options) {
    device_ = std::make_shared<ActingDevice>(world_.machine().device(0));
    const std::shared_ptr<Device> device = device_;
    return OffloadSession::Create(options, {"emu", [device](int) { return device; }}).value();
  }

  World world_{SmallWindows()};
  std::shared_ptr<ActingDevice> device_;
};

TEST_F(OffloadMeanwhile, ASourceIsFreedAfterTheCopyThatWasSubmittedMeanwhile) {
  const auto session = NewSession(SmallWindows(256 * kKiB));
  at::Tensor first;
  at::Tensor second;
  {
    const OffloadScope scope(session);
    first = Probe(world_.carrier, {world_.activation(40)}, World::Use);  // waits for company
    ASSERT_EQ(session->GetEngineStats(0).d2h.submitted_transfers, 0u);
    device_->ActAtCopy(CopyDirection::kDeviceToHost, 1, [&first] { first.reset(); });
    second = Probe(world_.carrier, {world_.activation(64)}, World::Use);
  }
  ASSERT_FALSE(first.defined());
  // The race detector ends the process if these are bytes that the copy still reads.
  for (int i = 0; i < 8; ++i) world_.activation(40, i);
  EXPECT_EQ(session->GetStats().live_handles, 1u);
  second.backward();
}

// Between the choice of what leaves and its submission.
TEST_F(OffloadMeanwhile, ATensorMayGoWheneverTheDeviceIsAskedAboutACapture) {
  for (int number = 1; number <= 3; ++number) {
    SCOPED_TRACE(number);
    const auto session = NewSession(SmallWindows(256 * kKiB));
    at::Tensor first;
    at::Tensor second;
    {
      const OffloadScope scope(session);
      first = Probe(world_.carrier, {world_.activation(40)}, World::Use);  // waits for company
      device_->FailCalls([&first, left = number](const std::string& call, uint64_t) mutable {
        if (call == "IsCapturing" && --left == 0) first.reset();
        return absl::OkStatus();
      });
      second = Probe(world_.carrier, {world_.activation(64)}, World::Use);
    }
    device_->FailCalls([](const std::string&, uint64_t) { return absl::OkStatus(); });
    EXPECT_EQ(session->GetStats().packed, 2u);
    second.backward();
  }
}

TEST_F(OffloadMeanwhile, ATensorThatGoesWhileItsGroupIsCopiedIsNoPartOfTheGroup) {
  constexpr int kTensors = 8;
  const auto session = NewSession(SmallWindows(128 * kKiB));
  std::vector<at::Tensor> seen;
  std::vector<at::Tensor> nodes;
  {
    const OffloadScope scope(session);
    for (int i = 0; i < kTensors; ++i) {
      nodes.push_back(Observe(world_.carrier, {world_.activation(2, i)}, &seen));
    }
    device_->ActAtCopy(CopyDirection::kDeviceToHost, 1, [&nodes] { nodes[3].reset(); });
  }
  ASSERT_FALSE(nodes[3].defined());
  ASSERT_EQ(session->GetStats().grouped, static_cast<uint64_t>(kTensors));
  session->FreeDeviceMemory(0);
  EXPECT_EQ(session->GetStats().evicted_bytes, (kTensors - 1) * 2 * kKiB);
  nodes[7].backward();
  EXPECT_TRUE(SameBytes(seen[0], ActivationValues(KiB(2), 7)));
}

// No call to the device is made with a lock held that another thread's scope needs.
TEST_F(OffloadMeanwhile, AnotherThreadMayEndAScopeDuringEachCallToTheDevice) {
  const auto session = NewSession(SmallWindows(64 * kKiB));
  std::atomic<int> calls = 0;
  std::atomic<int> late = 0;
  std::atomic<int> running = 0;
  device_->FailCalls([&](const std::string&, uint64_t) {
    ++calls;
    ++running;
    const auto ended = std::make_shared<std::latch>(1);
    std::thread([&running, session, ended] {
      { const OffloadScope scope(session); }
      ended->count_down();
      --running;
    }).detach();
    if (!Soon([&] { return ended->try_wait(); })) ++late;
    return absl::OkStatus();
  });
  at::Tensor dropped;
  at::Tensor y = world_.carrier;
  {
    const OffloadScope scope(session);
    for (int i = 0; i < 4; ++i) y = Probe(y, {world_.activation(32)}, World::Use);
    dropped = Probe(world_.carrier, {world_.activation(32)}, World::Use);
  }
  dropped.reset();
  y.backward();
  y.reset();
  EXPECT_TRUE(Soon([&] { return session->GetStats().live_handles == 0; }));
  EXPECT_TRUE(Soon([&] { return running.load() == 0; }));
  device_->FailCalls([](const std::string&, uint64_t) { return absl::OkStatus(); });
  EXPECT_GT(calls.load(), 10);
  EXPECT_EQ(late.load(), 0);
}

TEST_F(OffloadMeanwhile, APrefetchThatNobodyWillReadIsDroppedWhenItWasSubmitted) {
  OffloadOptions options = SmallWindows(1);
  options.prefetch_window_bytes = 64 * kKiB;
  const auto session = NewSession(options);
  at::Tensor doomed;
  at::Tensor y;
  {
    const OffloadScope scope(session);
    y = world_.carrier;
    for (int i = 0; i < 3; ++i) y = Probe(y, {world_.activation(64)}, World::Use);
    doomed = Probe(world_.carrier, {world_.activation(64)}, World::Use);
    y = Probe(y, {world_.activation(64)}, World::Use);
  }
  device_->ActAtCopy(CopyDirection::kHostToDevice, 2, [&doomed] { doomed.reset(); });
  y.backward();
  ASSERT_FALSE(doomed.defined());
  ASSERT_TRUE(Soon([&] { return session->GetStats().live_handles == 0; }));
  EXPECT_EQ(session->GetStats().prefetches_dropped, 1u);
  EXPECT_GE(session->GetStats().prefetch_hits, 2u) << "its place in the window is free again";
}

TEST_F(OffloadMeanwhile, WhatIsBeingFetchedIsNotFetchedByAnotherReaderToo) {
  const auto session = NewSession(SmallWindows(1));
  UnpackSaved unpack;
  std::vector<at::Tensor> seen;
  std::thread reader;
  at::Tensor y;
  {
    const OffloadScope scope(session);
    const at::Tensor shared = world_.activation(64, 1);
    y = Probe(world_.carrier, {shared},
              [&](const at::Tensor& grad, const UnpackSaved& unpack_in_backward) {
                if (reader.joinable()) reader.join();
                unpack = unpack_in_backward;
                return grad;
              });
    y = Probe(y, {shared}, World::Use);
  }
  y.backward({}, /*retain_graph=*/true);
  const uint64_t before = session->GetEngineStats(0).h2d.submitted_transfers;
  device_->ActAtCopy(CopyDirection::kHostToDevice, 1, [&] {
    reader = std::thread([&] { seen = unpack(); });
    absl::SleepFor(absl::Milliseconds(50));  // as far as it comes
  });
  y.backward({}, /*retain_graph=*/true);
  ASSERT_EQ(seen.size(), 1u);
  EXPECT_TRUE(SameBytes(seen[0], ActivationValues(KiB(64), 1)));
  EXPECT_EQ(session->GetEngineStats(0).h2d.submitted_transfers, before + 1);
}

TEST_F(OffloadMeanwhile, WhatIsBeingPrefetchedIsNotFetchedByItsReaderToo) {
  OffloadOptions options = SmallWindows(1);
  options.prefetch_window_bytes = 64 * kKiB;
  const auto session = NewSession(options);
  UnpackSaved unpack;
  std::vector<at::Tensor> seen;
  std::thread reader;
  at::Tensor y;
  {
    const OffloadScope scope(session);
    y = Probe(world_.carrier, {world_.activation(64, 1)},
              [&](const at::Tensor& grad, const UnpackSaved& unpack_in_backward) {
                // At the end of backward what was fetched ahead goes, read or not.
                if (reader.joinable()) reader.join();
                unpack = unpack_in_backward;
                return grad;
              });
    y = Probe(y, {world_.activation(64, 2)}, World::Use);
  }
  y.backward({}, /*retain_graph=*/true);
  const uint64_t before = session->GetEngineStats(0).h2d.submitted_transfers;
  // The first one is the fetch of what backward reads first.
  device_->ActAtCopy(CopyDirection::kHostToDevice, 2, [&] {
    reader = std::thread([&] { seen = unpack(); });
    absl::SleepFor(absl::Milliseconds(50));  // as far as it comes
  });
  y.backward({}, /*retain_graph=*/true);
  ASSERT_EQ(seen.size(), 1u);
  EXPECT_TRUE(SameBytes(seen[0], ActivationValues(KiB(64), 1)));
  EXPECT_EQ(session->GetEngineStats(0).h2d.submitted_transfers, before + 2);
}

TEST_F(OffloadMeanwhile, WhatIsBeingPrefetchedIsNotPrefetchedByAnotherThreadToo) {
  OffloadOptions options = SmallWindows(1);
  options.prefetch_window_bytes = kMiB;
  const auto session = NewSession(options);
  const at::Tensor held = world_.activation(64, 2);
  std::thread reader;
  at::Tensor y;
  {
    const OffloadScope scope(session);
    y = Probe(world_.carrier, {world_.activation(64, 1)}, World::Use);
    y = Probe(y, {held}, [&](const at::Tensor& grad, const UnpackSaved& unpack) {
      device_->ActAtCopy(CopyDirection::kHostToDevice, 1, [&] {
        reader = std::thread([&] { unpack(); });
        absl::SleepFor(absl::Milliseconds(50));  // as far as it comes
      });
      unpack();
      reader.join();
      return grad;
    });
  }
  y.backward();
  EXPECT_EQ(session->GetStats().reused_on_device, 2u) << "the test's premise";
  EXPECT_EQ(session->GetEngineStats(0).h2d.submitted_transfers, 1u);
}

}  // namespace
}  // namespace pinion::testing
