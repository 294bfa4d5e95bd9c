// Checks exhausted host memory, exhausted device memory, and device failures. Gradients are right
// or there is a clear error, and nothing is left behind.

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/activations/offload_world.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/error_of.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace offload_limits_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint64_t kTensorBytes = 64 * kKiB;

// --- Host memory ---

// Peers' users report this case: a warning, and then the job is killed.
TEST(OffloadHostBudget, TensorsStayOnTheDeviceWhenItIsSpent) {
  OffloadOptions options = SmallWindows();
  options.allocator.segment_bytes = 16 * kKiB;
  options.allocator.max_locked_bytes = 32 * kKiB;
  EmuWorld world(MachineOptions(), options);
  const TestNet net(world.device(), at::kFloat);
  const Gradients plain = TrainStep(net, nullptr);
  for (int step = 0; step < 3; ++step) {
    ExpectSameGradients(plain, TrainStep(net, world.session()));
  }
  const OffloadStats stats = world.QuietStats();
  EXPECT_GT(stats.kept_no_host_memory, 0u);
  EXPECT_GT(stats.offloaded, 0u);
  EXPECT_EQ(stats.packed, stats.offloaded + stats.shared + stats.kept());
  EXPECT_LE(world.session()->GetAllocatorStats().locked_bytes.peak, 32 * kKiB);
  EXPECT_GT(world.session()->GetAllocatorStats().limit_refusals, 0u);
}

TEST(OffloadHostBudget, ATensorThatCannotBePinnedStaysOnTheDevice) {
  if (TestsRunOnGpu()) GTEST_SKIP() << "is about the emulated host memory";
  EmulatedOptions machine = MachineOptions();
  for (uint64_t at = 1; at <= 100; ++at) machine.faults.calls.push_back({DeviceCall::kPin, at});
  EmuWorld world(machine);
  const TestNet net(world.device(), at::kFloat);
  const Gradients plain = TrainStep(net, nullptr);
  ExpectSameGradients(plain, TrainStep(net, world.session()));
  EXPECT_GT(world.session()->GetStats().kept_no_host_memory, 0u);
  EXPECT_EQ(world.session()->GetStats().offloaded, 0u);
}

// --- Device memory ---

TEST(OffloadDeviceMemory, APrefetchThatDoesNotFitIsDropped) {
  OffloadWorld world(Windows(1, kMiB));
  std::vector<bool> same;
  const at::Tensor y = InScope(world.session(), world.carrier, [&](at::Tensor& y) {
    for (int i = 0; i < 4; ++i) {
      y = Probe(y, {world.activation(64, i)},
                [&same, i](const at::Tensor& grad, const UnpackSaved& unpack) {
                  same.push_back(SameBytes(unpack()[0], ActivationValues(KiB(64), i)));
                  return grad;
                });
    }
  });
  world.LeaveRoom(kTensorBytes + kTensorBytes / 2);
  y.backward();
  EXPECT_THAT(same, ::testing::ElementsAre(true, true, true, true));
  EXPECT_GT(world.stats().prefetches_refused, 0u);
  EXPECT_EQ(world.stats().fetched_on_demand, 4u);
}

// After a failed allocation, LibTorch's CUDA allocator empties its cache and waits for the device.
// At every unpack, that would cost more than prefetching gains.
TEST(OffloadDeviceMemory, PrefetchesThatDoNotFitAreTriedLessAndLessOften) {
  constexpr int kTensors = 16;
  for (const bool room_later : {false, true}) {
    SCOPED_TRACE(room_later ? "there is room later" : "there is never room");
    OffloadWorld world(Windows(1, kMiB));
    const at::Tensor y = InScope(world.session(), world.carrier, [&](at::Tensor& y) {
      for (int i = 0; i < kTensors; ++i) {
        y = Probe(y, {world.activation(64, i)},
                  [&, i](const at::Tensor& grad, const UnpackSaved& unpack) {
                    unpack();
                    if (room_later && i == kTensors / 2) world.LeaveRoom(8 * kTensorBytes);
                    return grad;
                  });
      }
    });
    world.LeaveRoom(kTensorBytes + kTensorBytes / 2);
    y.backward();
    const OffloadStats stats = world.QuietStats();
    EXPECT_GT(stats.prefetches_refused, 0u);
    EXPECT_LE(stats.prefetches_refused, 4u);  // pauses double: 1, 2, 4, 8 unpacks
    EXPECT_EQ(stats.prefetch_hits > 0, room_later) << stats.ToString();
  }
}

TEST(OffloadDeviceMemory, AHugeTensorWidensTheAutomaticWindowUntilTheNextScopeEnds) {
  OffloadWorld world(SmallWindows(OffloadOptions::kAutoWindow));
  const auto evicted_bytes = [&](at::IntArrayRef sizes) {
    const uint64_t before = world.stats().evicted_bytes;
    std::vector<at::Tensor> seen;
    const at::Tensor y = InScope(world.session(), world.carrier, [&](at::Tensor& y) {
      for (int i = 0; i < 8; ++i) y = Observe(y, {Activation(world.carrier, sizes, i)}, &seen);
    });
    return world.stats().evicted_bytes - before;
  };
  evicted_bytes({256, 256});
  EXPECT_EQ(evicted_bytes({32, 32}), 0u);
  EXPECT_EQ(evicted_bytes({32, 32}), 6u * 4 * kKiB);
}

TEST(OffloadDeviceMemory, ATensorThatIsNeededTakesThePlaceOfUnreadPrefetches) {
  OffloadWorld world(Windows(1, kMiB));
  const auto dropped = [&] { return world.stats().prefetches_dropped; };
  bool same = false;
  std::vector<std::vector<at::Tensor>> seen(2);
  at::Tensor needed;
  const at::Tensor y = InScope(world.session(), world.carrier, [&](at::Tensor& y) {
    for (int i = 0; i < 2; ++i) y = Observe(y, {world.activation(64, i)}, &seen[i]);
    y = Probe(y, {world.activation(64, 2)}, [&](const at::Tensor& grad, const UnpackSaved& unpack) {
      const std::vector<at::Tensor> read = unpack();
      // The two tensors before it are prefetched by this point.
      world.LeaveRoom(kTensorBytes + kTensorBytes / 2);
      EXPECT_EQ(dropped(), 0u);
      needed.backward();
      EXPECT_GE(dropped(), 2u);
      world.LeaveRoom(8 * kTensorBytes);
      return grad;
    });
    needed = Probe(world.carrier, {world.activation(128, 7)},
                   [&](const at::Tensor& grad, const UnpackSaved& unpack) {
                     same = SameBytes(unpack()[0], ActivationValues(KiB(128), 7));
                     return grad;
                   });
  });
  y.backward();
  EXPECT_TRUE(same);
  EXPECT_TRUE(SameBytes(seen[0][0], ActivationValues(KiB(64), 0)));
  EXPECT_TRUE(SameBytes(seen[1][0], ActivationValues(KiB(64), 1)));
}

TEST(OffloadDeviceMemory, ATensorThatDoesNotFitAtAllIsAnOutOfMemoryErrorThatPasses) {
  OffloadWorld world(SmallWindows(1));
  std::vector<at::Tensor> seen;
  const at::Tensor y = InScope(
      world.session(), [&] { return Observe(world.carrier, {world.activation(64, 1)}, &seen); });
  world.LeaveRoom(kTensorBytes / 2);
  EXPECT_THROW(y.backward({}, /*retain_graph=*/true), c10::OutOfMemoryError);
  world.LeaveRoom(2 * kTensorBytes);
  y.backward();
  EXPECT_TRUE(SameBytes(seen[0], ActivationValues(KiB(64), 1)));
}

TEST(OffloadDeviceMemory, ATensorThatDoesNotFitBesideATargetNamesTheTarget) {
  OffloadWorld world(WithTarget(kMiB));
  std::vector<at::Tensor> seen;
  const at::Tensor y = InScope(
      world.session(), [&] { return Observe(world.carrier, {world.activation(64, 1)}, &seen); });
  world.LeaveRoom(kTensorBytes / 2);
  EXPECT_THAT(ErrorOf([&] { y.backward(); }),
              AllOf(HasSubstr("memory_target_bytes is 1048576"),
                    HasSubstr("fetching 65536 bytes for backward: the device has ")));
}

// Nothing depends on a prefetch, so its errors are left to the fetch on demand.
TEST(OffloadDeviceMemory, APrefetchThatMeetsABrokenDeviceFailsNothing) {
  uint64_t allocations = 0;  // up to and including the prefetch's
  for (const bool broken : {false, true}) {
    SCOPED_TRACE(broken ? "broken" : "whole");
    EmulatedOptions machine = MachineOptions();
    if (broken) machine.faults.calls = {{DeviceCall::kAllocate, allocations, /*sticky=*/true}};
    OffloadWorld world(Windows(1, kMiB), machine);
    std::vector<at::Tensor> seen;
    bool later_was_read = false;
    const at::Tensor y = InScope(world.session(), world.carrier, [&](at::Tensor& y) {
      y = Observe(y, {world.activation(64, 1)}, &seen);
      y = Probe(y, {world.activation(64, 2)},
                [&](const at::Tensor& grad, const UnpackSaved& unpack) {
                  later_was_read = unpack()[0].defined();
                  allocations = world.machine().calls(DeviceCall::kAllocate);
                  return grad;
                });
    });
    if (broken) {
      EXPECT_THROW(y.backward({}, /*retain_graph=*/true), c10::Error);
      EXPECT_THROW(y.backward(), c10::Error) << "and not a thread that waits for ever";
    } else {
      y.backward();
      EXPECT_EQ(world.stats().prefetch_hits, 1u) << "the test's premise";
    }
    EXPECT_TRUE(later_was_read);
  }
}

// --- A device that fails for a moment ---

// Has enough layers for the engine to query events, if that is the failing call.
NetShape TinyNet(DeviceCall call) {
  NetShape shape;
  shape.layers = call == DeviceCall::kQueryEvent ? 4 : 1;
  shape.tokens = 8;
  return shape;
}

// Small bounds and slow copies cover every path: chunks, several batches, prefetches, polling.
OffloadOptions TightOptions() {
  OffloadOptions options = SmallWindows(6 * kKiB);
  options.engine.max_chunk_bytes = kKiB / 2;
  options.allocator.segment_bytes = 16 * kKiB;
  return options;
}

class OffloadFaults : public ::testing::TestWithParam<std::tuple<DeviceCall, bool>> {};

TEST_P(OffloadFaults, EveryCallOfAStepMayFailOnce) {
  const DeviceCall call = std::get<0>(GetParam());
  OffloadOptions options = TightOptions();
  options.overlap = std::get<1>(GetParam());
  Gradients plain;
  uint64_t calls_before = 0;
  uint64_t calls_in_forward = 0;
  uint64_t calls_after = 0;
  {
    EmuWorld world(SlowCopies(/*stall_ms=*/1), options);
    const TestNet net(world.device(), at::kFloat, TinyNet(call));
    calls_before = world.machine().calls(call);
    SeedGenerators();
    const at::Tensor loss = InScope(world.session(), [&] { return net.Loss(); });
    calls_in_forward = world.machine().calls(call);
    loss.backward();
    plain = TakeGradients(net, loss);
    calls_after = world.machine().calls(call);
    ExpectSameGradients(TrainStep(net, nullptr), plain);
  }
  ASSERT_LT(calls_before, calls_after) << "a step makes no such call";
  for (uint64_t at = calls_before + 1; at <= calls_after; ++at) {
    SCOPED_TRACE(std::string(DeviceCallName(call)) + " call " + std::to_string(at));
    // A tensor without host memory or copy stays on the device, and a query is repeated.
    const bool must_succeed = call == DeviceCall::kPin || call == DeviceCall::kQueryEvent ||
                              (call == DeviceCall::kCopy && at <= calls_in_forward);
    EmulatedOptions machine = SlowCopies(/*stall_ms=*/1);
    machine.faults.calls.push_back({call, at, /*sticky=*/false});
    EmuWorld world(machine, options);
    const TestNet net(world.device(), at::kFloat, TinyNet(call));
    try {
      const Gradients gradients = TrainStep(net, world.session());
      EXPECT_TRUE(SameGradients(plain, gradients)) << "a wrong gradient without an error";
    } catch (const c10::Error& error) {
      EXPECT_FALSE(must_succeed) << error.what_without_backtrace();
      EXPECT_THAT(error.what(), HasSubstr("failed (injected, transient)"));
    }
    for (const at::Tensor& parameter : net.parameters()) parameter.mutable_grad().reset();
    EXPECT_TRUE(Soon([&] { return world.session()->GetStats().live_handles == 0; }));
    EXPECT_EQ(world.session()->GetAllocatorStats().booked_bytes.current, 0u)
        << "host blocks were leaked";
    ExpectSameGradients(plain, TrainStep(net, world.session()));
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(
    AllCalls, OffloadFaults,
    ::testing::Combine(::testing::Values(DeviceCall::kAllocate, DeviceCall::kPin, DeviceCall::kCopy,
                                         DeviceCall::kKernel, DeviceCall::kCreateStream,
                                         DeviceCall::kCreateEvent, DeviceCall::kRecordEvent,
                                         DeviceCall::kStreamWaitEvent, DeviceCall::kQueryEvent),
                       ::testing::Values(true)),
    [](const auto& info) { return std::string(DeviceCallName(std::get<0>(info.param))); });

INSTANTIATE_TEST_SUITE_P(
    BlockingCalls, OffloadFaults,
    ::testing::Combine(::testing::Values(DeviceCall::kAllocate, DeviceCall::kPin, DeviceCall::kCopy,
                                         DeviceCall::kRecordEvent, DeviceCall::kWaitEvent),
                       ::testing::Values(false)),
    [](const auto& info) { return std::string(DeviceCallName(std::get<0>(info.param))); });

}  // namespace offload_limits_test
}  // namespace pinion::testing
