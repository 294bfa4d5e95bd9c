// What docs/users/limits.md says that Pinion does not promise, as it happens.

#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/mul.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace documented_limits_test {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class DocumentedLimits : public OffloadFixture {
 protected:
  DocumentedLimits() : OffloadFixture(SmallWindows(1), CollectRaces()) {}

  at::Tensor activation(int first) { return Activation(carrier_, {64, 64}, first); }
};

// --- Writes that raise no version ---

// Writes to `tensor` through x.data(), which has a version counter of its own.
void WriteUnnoticed(const at::Tensor& tensor) { tensor.variable_data().add_(1000); }

TEST_F(DocumentedLimits, AWriteThatRaisesNoVersionIsNotInTheCopyThatWasMadeBefore) {
  for (const bool held : {true, false}) {
    SCOPED_TRACE(held ? "still on the device at backward" : "gone from the device");
    at::Tensor x = activation(1);
    const at::Tensor y = InScope(world_.session(), [&] { return Observe(carrier_, {x}, &seen_); });
    ASSERT_TRUE(world_.machine().SynchronizeDevice(0).ok());
    WriteUnnoticed(x);
    if (!held) x.reset();
    y.backward();
    const at::Tensor saved = ActivationValues({64, 64}, 1);
    EXPECT_TRUE(SameBytes(seen_[0], held ? saved.add(1000) : saved));
  }
  EXPECT_EQ(stats().offloaded, 2u);
  EXPECT_EQ(stats().fetched_on_demand, 1u);
}

TEST_F(DocumentedLimits, ASecondSaveAfterAWriteThatRaisesNoVersionSharesTheFirstCopy) {
  at::Tensor x = activation(1);
  std::vector<at::Tensor> seen_first;
  std::vector<at::Tensor> seen_second;
  at::Tensor y;
  {
    const OffloadScope scope(world_.session());
    y = Observe(carrier_, {x}, &seen_first);
    y = Observe(y, {activation(2)}, &seen_);  // evicts x
    ASSERT_TRUE(world_.machine().SynchronizeDevice(0).ok());
    WriteUnnoticed(x);
    y = Observe(y, {x}, &seen_second);
    x.reset();
  }
  EXPECT_EQ(stats().shared, 1u);
  y.backward();
  EXPECT_TRUE(SameBytes(seen_first[0], ActivationValues({64, 64}, 1)));
  EXPECT_TRUE(SameBytes(seen_second[0], ActivationValues({64, 64}, 1)));
}

// set_data() replaces a tensor's memory. Autograd keeps the tensor and reads its current memory.
TEST_F(DocumentedLimits, WhatSetDataGivesATensorIsReadOnlyWhereTheTensorIsALeafThatStays) {
  const auto read_back = [this](const at::Tensor& x, bool offload) {
    std::vector<at::Tensor> seen_other;
    const at::Tensor y =
        InScope(offload ? world_.session() : nullptr, carrier_, [&](at::Tensor& y) {
          y = Observe(y, {x}, &seen_);
          y = Observe(y, {activation(2)}, &seen_other);  // evicts x
        });
    const at::Tensor other = ActivationValues(x.sizes(), 7).to(world_.device());
    x.set_data(other);
    y.backward();
    return seen_.at(0);
  };
  const auto leaf = [this](int64_t side) {
    return ActivationValues({side, side}, 1).to(world_.device());
  };
  const at::Tensor given = ActivationValues({64, 64}, 7);
  const at::Tensor given_small = ActivationValues({4, 4}, 7);
  EXPECT_TRUE(SameBytes(read_back(activation(1), /*offload=*/false), given));
  EXPECT_TRUE(SameBytes(read_back(activation(1), /*offload=*/true), ActivationValues({64, 64}, 1)));
  EXPECT_EQ(stats().kept_held + stats().kept_small + stats().kept_parameter, 0u);
  const at::Tensor parameter = leaf(64).requires_grad_(true);
  EXPECT_TRUE(SameBytes(read_back(parameter, /*offload=*/true), given));
  EXPECT_EQ(stats().kept_parameter, 1u);
  EXPECT_TRUE(SameBytes(read_back(leaf(4), /*offload=*/true), given_small));
  EXPECT_EQ(stats().kept_small, 1u);
  const at::Tensor held = leaf(64);
  EXPECT_TRUE(SameBytes(read_back(held, /*offload=*/true), ActivationValues({64, 64}, 1)));
  EXPECT_EQ(stats().kept_held, 1u);
}

// --- Threads that outlive their scope ---

TEST_F(DocumentedLimits, WhatAThreadSavesAfterItsScopeHasEndedStaysOnTheDevice) {
  at::Tensor y;
  auto scope = std::make_unique<OffloadScope>(world_.session());
  const at::ThreadLocalState inside;
  y = Observe(carrier_, {activation(1)}, &seen_);
  scope.reset();
  std::thread([&] {
    const at::ThreadLocalStateGuard guard(inside);
    y = Observe(y, {activation(2)}, &seen_);
  }).join();
  EXPECT_EQ(stats().offloaded, 1u);
  EXPECT_EQ(stats().kept_scope_ended, 1u);
  y.backward();
  EXPECT_TRUE(SameBytes(seen_[0], ActivationValues({64, 64}, 1)));
}

// --- Readers on side streams ---

void Join(const c10::Stream& from, const c10::Stream& to) {
  c10::Event event(from.device_type());
  event.record(from);
  event.block(to);
}

// Returns the races of a program that reads a saved tensor on a side stream, joins the stream
// before backward, and relies on the graph to keep the tensor.
std::vector<std::string> ReadOnASideStream(bool offload, bool record_stream) {
  EmuWorld world(CollectRaces(), SmallWindows(1));
  const at::Tensor carrier = NewCarrier(world);
  const c10::Stream main =
      c10::impl::VirtualGuardImpl(world.device().type()).getStream(world.device());
  const c10::Stream side = world.NewStream();
  std::vector<at::Tensor> seen;
  at::Tensor read;
  const at::Tensor y = InScope(offload ? world.session() : nullptr, carrier, [&](at::Tensor& y) {
    at::Tensor x = Activation(carrier, {64, 64}, 1);
    Join(main, side);
    {
      const c10::NoGradGuard no_grad;
      const c10::StreamGuard guard(side);
      read = at::mul(x, 2);
    }
    if (record_stream) x.record_stream(side);
    y = Observe(y, {std::exchange(x, at::Tensor())}, &seen);
    y = Observe(y, {Activation(carrier, {64, 64}, 2)}, &seen);
    for (int i = 0; i < 4; ++i) Activation(carrier, {64, 64}, 7);  // may reuse x's memory
  });
  Join(side, main);
  y.backward();
  EXPECT_EQ(world.session()->GetStats().evicted_bytes > 0, offload);
  return world.machine().races();
}

TEST(DocumentedLimitsStreams, AReaderOnASideStreamThatReliesOnTheGraphIsARace) {
  EXPECT_THAT(ReadOnASideStream(/*offload=*/false, /*record_stream=*/false), IsEmpty());
  EXPECT_THAT(ReadOnASideStream(/*offload=*/true, /*record_stream=*/false),
              Contains(HasSubstr("aten::mul")));
}

TEST(DocumentedLimitsStreams, AReaderOnASideStreamThatTheFrameworkKnowsOfIsSafe) {
  EXPECT_THAT(ReadOnASideStream(/*offload=*/true, /*record_stream=*/true), IsEmpty());
}

// Returns the races of a program that writes a saved tensor on a side stream after the graph ends.
std::vector<std::string> WriteOnASideStream(bool wait) {
  EmuWorld world(CollectRaces(), SmallWindows(1));
  const at::Tensor carrier = NewCarrier(world);
  const c10::Stream main =
      c10::impl::VirtualGuardImpl(world.device().type()).getStream(world.device());
  const c10::Stream side = world.NewStream();
  std::vector<at::Tensor> seen;
  const at::Tensor x = Activation(carrier, {64, 64}, 1);
  Join(main, side);
  {
    const OffloadScope scope(world.session());
    at::Tensor y = Observe(carrier, {x}, &seen);
    y = Observe(y, {Activation(carrier, {64, 64}, 2)}, &seen);
  }
  EXPECT_EQ(world.session()->GetStats().offloaded, 2u);
  if (wait) Join(main, side);
  const c10::NoGradGuard no_grad;
  const c10::StreamGuard guard(side);
  x.mul_(2);
  return world.machine().races();
}

TEST(DocumentedLimitsStreams, AWriteOnASideStreamThatDoesNotWaitIsARace) {
  EXPECT_THAT(WriteOnASideStream(/*wait=*/false), Contains(HasSubstr("aten::mul")));
  EXPECT_THAT(WriteOnASideStream(/*wait=*/true), IsEmpty());
}

// --- What a scope does not see ---

// LibTorch passes a thread's state to autograd's workers, but not to threads of the program, nor to
// those of at::parallel_for.
TEST_F(DocumentedLimits, AScopeDoesNotReachThreadsThatLibTorchDoesNotCarryItTo) {
  const OffloadScope scope(world_.session());
  for (const bool own_scope : {false, true}) {
    std::thread([&] {
      std::optional<OffloadScope> own;
      if (own_scope) own.emplace(world_.session());
      Observe(carrier_, {activation(1)}, &seen_).backward();
    }).join();
    EXPECT_TRUE(SameBytes(seen_.at(0), ActivationValues({64, 64}, 1)));
    EXPECT_EQ(stats().packed, own_scope ? 1u : 0u);
  }
}

TEST_F(DocumentedLimits, AScopeInARecomputationOffloadsNothing) {
  at::Tensor y = Probe(carrier_, {}, [this](const at::Tensor& grad, const UnpackSaved&) {
    const c10::AutoGradMode with_grad(true);
    const OffloadScope scope(world_.session());
    Observe(carrier_, {activation(1)}, &seen_).backward();
    return grad;
  });
  y.backward();
  EXPECT_TRUE(SameBytes(seen_.at(0), ActivationValues({64, 64}, 1)));
  EXPECT_EQ(stats().offloaded, 0u);
  EXPECT_EQ(stats().kept_in_backward, 1u);
}

// --- Memory that offloading does not free, and orders that it does not foresee ---

// In peers, too, a reference keeps copied memory (TransformerEngine#1514, fairscale#947).
TEST_F(DocumentedLimits, AnActivationThatTheProgramHoldsIsCopiedAndFreesNothing) {
  const at::Tensor held = activation(1);
  const uint64_t before_bytes = world_.machine().memory_stats(0).in_use_bytes;
  for (uint64_t step = 1; step <= 2; ++step) {
    const OffloadScope scope(world_.session());
    at::Tensor y = Observe(carrier_, {held}, &seen_);
    y = Observe(y, {activation(2)}, &seen_);
    EXPECT_EQ(stats().evicted_not_freed, step) << "copied again in each step";
  }
  ASSERT_TRUE(world_.machine().SynchronizeDevice(0).ok());
  EXPECT_GE(world_.machine().memory_stats(0).in_use_bytes, before_bytes);
}

// Prefetching goes from newest to oldest; a node reads its tensors from first to last.
TEST_F(DocumentedLimits, WhatIsReadInAnotherOrderThanTheReverseOfPackingIsFetchedOnDemand) {
  constexpr int kTensors = 6;
  for (const bool one_node : {false, true}) {
    SCOPED_TRACE(one_node ? "saved by one node" : "saved by a node each");
    const OffloadStats before = stats();
    std::vector<std::vector<at::Tensor>> seen(kTensors);
    const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
      std::vector<at::Tensor> activations;
      for (int i = 0; i < kTensors; ++i) {
        activations.push_back(Activation(carrier_, {256, 256}, i));
        if (!one_node) y = Observe(y, {std::exchange(activations[i], at::Tensor())}, &seen[i]);
      }
      if (one_node) y = Observe(y, std::exchange(activations, {}), &seen[0]);
    });
    y.backward();
    EXPECT_TRUE(SameBytes(seen[0].at(0), ActivationValues({256, 256}, 0)));
    EXPECT_EQ(stats().fetched_on_demand - before.fetched_on_demand, one_node ? kTensors : 1u);
  }
}

}  // namespace documented_limits_test
}  // namespace pinion::testing
