// What happens when something runs out or breaks: host memory, device memory, the device itself.
// Gradients are right or there is a clear error, and nothing is left behind.

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/hooks/offload_options.h"
#include "pinion/hooks/offload_session.h"
#include "pinion/hooks/offload_stats.h"
#include "pinion/tests/hooks/emu_fixture.h"
#include "pinion/tests/hooks/probe.h"
#include "pinion/tests/hooks/test_net.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint64_t kTensorBytes = 64 * kKiB;

at::Tensor NewCarrier(EmuWorld& world) {
  return at::ones({1}, at::TensorOptions(world.device())).requires_grad_(true);
}

at::Tensor LargeActivation(const at::Tensor& carrier, int first) {
  return Activation(carrier, {128, 128}, first);
}

// --- Host memory ---

// The issue of every peer: one warning, and the job is killed.
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

// Leaves room for `size_bytes` more than what is in use now.
void LeaveRoom(EmuWorld& world, uint64_t size_bytes) {
  ASSERT_THAT(world.machine().SynchronizeDevice(0), IsOk());
  const uint64_t in_use = world.machine().memory_stats(0).in_use_bytes;
  ASSERT_THAT(world.machine().SetMemoryLimit(0, in_use + size_bytes), IsOk());
}

OffloadOptions EvictAllPrefetchAll() {
  OffloadOptions options = SmallWindows(1);
  options.prefetch_window_bytes = kMiB;
  return options;
}

TEST(OffloadDeviceMemory, APrefetchThatDoesNotFitIsDropped) {
  EmuWorld world(MachineOptions(), EvictAllPrefetchAll());
  const at::Tensor carrier = NewCarrier(world);
  std::vector<std::vector<at::Tensor>> seen(4);
  std::vector<bool> same;
  at::Tensor y = carrier;
  {
    const OffloadScope scope(world.session());
    for (int i = 0; i < 4; ++i) {
      y = Probe(y, {LargeActivation(carrier, i)},
                [&same, i](const at::Tensor& grad, const UnpackSaved& unpack) {
                  same.push_back(SameBytes(unpack()[0], ActivationValues({128, 128}, i)));
                  return grad;
                });
    }
  }
  LeaveRoom(world, kTensorBytes + kTensorBytes / 2);
  y.backward();
  EXPECT_THAT(same, ::testing::ElementsAre(true, true, true, true));
  EXPECT_GT(world.session()->GetStats().prefetches_refused, 0u);
  EXPECT_EQ(world.session()->GetStats().fetched_on_demand, 4u);
}

TEST(OffloadDeviceMemory, ATensorThatIsNeededTakesThePlaceOfUnreadPrefetches) {
  EmuWorld world(MachineOptions(), EvictAllPrefetchAll());
  const at::Tensor carrier = NewCarrier(world);
  std::vector<at::Tensor> seen_needed;
  std::vector<std::vector<at::Tensor>> seen(3);
  at::Tensor needed;
  at::Tensor y = carrier;
  {
    const OffloadScope scope(world.session());
    for (int i = 0; i < 2; ++i) y = Observe(y, {LargeActivation(carrier, i)}, &seen[i]);
    y = Probe(y, {LargeActivation(carrier, 2)},
              [&](const at::Tensor& grad, const UnpackSaved& unpack) {
                seen[2] = unpack();  // and the two before it are fetched ahead
                LeaveRoom(world, kTensorBytes + kTensorBytes / 2);
                needed.backward();
                return grad;
              });
    needed = Observe(carrier, {Activation(carrier, {256, 128}, 7)}, &seen_needed);
  }
  y.backward();
  EXPECT_TRUE(SameBytes(seen_needed[0], ActivationValues({256, 128}, 7)));
  EXPECT_GE(world.session()->GetStats().prefetches_dropped, 2u);
}

TEST(OffloadDeviceMemory, ATensorThatDoesNotFitAtAllIsAnOutOfMemoryErrorThatPasses) {
  EmuWorld world(MachineOptions(), SmallWindows(1));
  const at::Tensor carrier = NewCarrier(world);
  std::vector<at::Tensor> seen;
  at::Tensor y;
  {
    const OffloadScope scope(world.session());
    y = Observe(carrier, {LargeActivation(carrier, 1)}, &seen);
  }
  LeaveRoom(world, kTensorBytes / 2);
  EXPECT_THROW(y.backward({}, /*retain_graph=*/true), c10::OutOfMemoryError);
  LeaveRoom(world, 2 * kTensorBytes);
  y.backward();
  EXPECT_TRUE(SameBytes(seen[0], ActivationValues({128, 128}, 1)));
}

// --- A device that fails ---

// Calls of a kind before and after a training step with offload, on a machine without faults.
struct CallRange {
  uint64_t before = 0;
  uint64_t after = 0;
};

NetShape TinyNet() {
  NetShape shape;
  shape.layers = 1;
  shape.tokens = 8;
  return shape;
}

// Small enough for every path: flow control, several batches, prefetches, polling.
OffloadOptions TightOptions() {
  OffloadOptions options = SmallWindows(6 * kKiB);
  options.engine.max_in_flight_bytes = 6 * kKiB;
  options.allocator.segment_bytes = 16 * kKiB;
  return options;
}

CallRange CallsOfAStep(DeviceCall call) {
  EmuWorld world(MachineOptions(), TightOptions());
  const TestNet net(world.device(), at::kFloat, TinyNet());
  CallRange range;
  range.before = world.machine().calls(call);
  TrainStep(net, world.session());
  range.after = world.machine().calls(call);
  return range;
}

class OffloadFaults : public ::testing::TestWithParam<DeviceCall> {
 protected:
  // A training step in which the k-th call of a kind fails. The error, or empty if there was none:
  // then the gradients have been compared.
  std::string Step(const Fault& fault, const Gradients& plain) {
    EmulatedOptions machine = MachineOptions();
    machine.faults.calls.push_back(fault);
    EmuWorld world(machine, TightOptions());
    const TestNet net(world.device(), at::kFloat, TinyNet());
    std::string error;
    try {
      const Gradients gradients = TrainStep(net, world.session());
      EXPECT_TRUE(SameGradients(plain, gradients)) << "a wrong gradient without an error";
    } catch (const c10::Error& thrown) {
      error = thrown.what_without_backtrace();
      EXPECT_FALSE(error.empty());
    }
    for (const at::Tensor& parameter : net.parameters()) parameter.mutable_grad().reset();
    EXPECT_TRUE(Soon([&] { return world.session()->GetStats().live_handles == 0; }));
    EXPECT_EQ(world.session()->GetAllocatorStats().booked_bytes.current, 0u)
        << "host blocks were leaked";
    if (!fault.sticky) {
      // An error that passes leaves a session that works.
      ExpectSameGradients(plain, TrainStep(net, world.session()));
    }
    return error;
  }

  static Gradients PlainGradients() {
    EmuWorld world;
    const TestNet net(world.device(), at::kFloat, TinyNet());
    return TrainStep(net, nullptr);
  }
};

TEST_P(OffloadFaults, EveryCallMayFailOnce) {
  const Gradients plain = PlainGradients();
  const CallRange calls = CallsOfAStep(GetParam());
  for (uint64_t at = calls.before + 1; at <= calls.after; ++at) {
    SCOPED_TRACE(std::string(DeviceCallName(GetParam())) + " call " + std::to_string(at));
    Step({GetParam(), at, /*sticky=*/false}, plain);
    if (HasFailure()) return;
  }
}

TEST_P(OffloadFaults, EveryCallMayFailForGood) {
  const Gradients plain = PlainGradients();
  const CallRange calls = CallsOfAStep(GetParam());
  for (uint64_t at = calls.before + 1; at <= calls.after; ++at) {
    SCOPED_TRACE(std::string(DeviceCallName(GetParam())) + " call " + std::to_string(at));
    EXPECT_THAT(Step({GetParam(), at, /*sticky=*/true}, plain), HasSubstr("emu:0"));
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(AllCalls, OffloadFaults,
                         ::testing::Values(DeviceCall::kAllocate, DeviceCall::kPin,
                                           DeviceCall::kCopy, DeviceCall::kKernel,
                                           DeviceCall::kCreateStream, DeviceCall::kCreateEvent,
                                           DeviceCall::kRecordEvent, DeviceCall::kStreamWaitEvent,
                                           DeviceCall::kQueryEvent, DeviceCall::kWaitEvent,
                                           DeviceCall::kSynchronize),
                         [](const auto& info) { return std::string(DeviceCallName(info.param)); });

TEST(OffloadStickyError, BackwardNamesTheFirstCallThatFailedAndHostDataIsKept) {
  uint64_t copies_of_forward = 0;
  const auto forward = [](EmuWorld& world, std::vector<at::Tensor>* seen) {
    const at::Tensor carrier = NewCarrier(world);
    const OffloadScope scope(world.session());
    return Observe(carrier, {LargeActivation(carrier, 1)}, seen);
  };
  {
    EmuWorld world(MachineOptions(), SmallWindows(1));
    std::vector<at::Tensor> seen;
    forward(world, &seen);
    copies_of_forward = world.machine().calls(DeviceCall::kCopy);
  }
  EmulatedOptions machine = MachineOptions();
  machine.faults.calls.push_back({DeviceCall::kCopy, copies_of_forward + 1, /*sticky=*/true});
  EmuWorld world(machine, SmallWindows(1));
  std::vector<at::Tensor> seen;
  at::Tensor y = forward(world, &seen);
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      y.backward({}, /*retain_graph=*/true);
      FAIL() << "backward should have thrown";
    } catch (const c10::Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("emu:0"));
      if (attempt == 0) {
        EXPECT_THAT(error.what(), AllOf(HasSubstr("fetching a saved tensor"),
                                        HasSubstr("failed for good at CopyAsync")));
      }
    }
    EXPECT_GE(world.session()->GetAllocatorStats().booked_bytes.current, kTensorBytes);
  }
  y.reset();
}

}  // namespace
}  // namespace pinion::testing
