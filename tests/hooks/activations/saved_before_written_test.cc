// Checks tensors that an operator saves before its kernel writes them. LibTorch saves arguments
// first, and some kernels fill theirs without raising a version. Such a tensor must not be read
// before its operator has returned, with or without overlap or verify mode.

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/instance_norm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/rrelu.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <string>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace {

OffloadOptions OptionsOf(bool overlap, bool verify) {
  OffloadOptions options = SmallWindows(1);
  options.overlap = overlap;
  options.verify = verify;
  return options;
}

class SavedBeforeWritten : public OffloadFixture,
                           public ::testing::WithParamInterface<std::tuple<bool, bool>> {
 protected:
  SavedBeforeWritten()
      : OffloadFixture(OptionsOf(std::get<0>(GetParam()), /*verify=*/std::get<1>(GetParam()))) {}

  // Returns the gradient of `x` in sum(square(forward(x))), on the CPU.
  template <typename Forward>
  at::Tensor GradientOf(const at::Tensor& x, bool offload, Forward forward) {
    SeedGenerators();
    const at::Tensor loss = InScope(offload ? world_.session() : nullptr, [&] {
      const at::Tensor y = forward(at::mul(x, 1));
      return at::sum(at::mul(y, y));
    });
    // Overwrites freed memory.
    std::vector<at::Tensor> others;
    for (int i = 0; i < 16; ++i) {
      others.push_back(at::full({64, 64}, NAN, at::TensorOptions(world_.device())));
    }
    loss.backward();
    const at::Tensor grad = x.grad().cpu();
    x.mutable_grad().reset();
    return grad;
  }
};

// In general: an activation that is written between its save and the operator's return.
TEST_P(SavedBeforeWritten, AnActivationLeavesAsItsOperatorHasLeftIt) {
  std::vector<at::Tensor> seen_next;
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    at::Tensor noise = activation({64, 64}, 1);
    // A later save of the same node does not mean that the operator has returned.
    y = Observe(y, {noise, activation({64, 64}, 3)}, &seen_);
    noise.variable_data().copy_(ActivationValues({64, 64}, 7));  // raises no version of `noise`
    noise.reset();
    y = Observe(y, {activation({64, 64}, 2)}, &seen_next);
    EXPECT_GT(stats().evicted_bytes, 0u) << "the operator has returned";
  });
  y.backward();
  EXPECT_EQ(stats().offloaded, 3u);
  EXPECT_GT(stats().fetched_bytes, 0u);
  EXPECT_TRUE(SameBytes(seen_[0], ActivationValues({64, 64}, 7)));
}

// Its first operator has returned, the second has not.
TEST_P(SavedBeforeWritten, ATensorThatTwoOperatorsSaveLeavesAsTheSecondHasLeftIt) {
  std::vector<at::Tensor> seen_next;
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    at::Tensor noise = activation({64, 64}, 1);
    y = Observe(y, {noise}, &seen_next);
    y = Observe(y, {noise, activation({64, 64}, 3)}, &seen_);
    noise.variable_data().copy_(ActivationValues({64, 64}, 7));
    noise.reset();
    y = Observe(y, {activation({64, 64}, 2)}, &seen_next);
    EXPECT_GT(stats().evicted_bytes, 0u) << "both operators have returned";
  });
  y.backward();
  EXPECT_EQ(stats().shared, 1u);
  EXPECT_GT(stats().fetched_bytes, 0u);
  EXPECT_TRUE(SameBytes(seen_[0], ActivationValues({64, 64}, 7)));
}

TEST_P(SavedBeforeWritten, SmallOnesThatAreGatheredLeaveAsTheirOperatorHasLeftThem) {
  constexpr int kTensors = 16;
  std::vector<std::vector<at::Tensor>> seen(kTensors);
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    for (int i = 0; i < kTensors; ++i) {
      at::Tensor noise = activation({512}, i);
      y = Observe(y, {noise}, &seen[i]);
      noise.variable_data().copy_(ActivationValues({512}, 100 + i));
    }
  });
  y.backward();
  EXPECT_EQ(stats().offloaded, kTensors);
  for (int i = 0; i < kTensors; ++i) {
    EXPECT_TRUE(SameBytes(seen[i].at(0), ActivationValues({512}, 100 + i))) << "tensor " << i;
  }
}

TEST_P(SavedBeforeWritten, RandomLeakyReluGivesTheSameGradient) {
  const at::Tensor x = at::randn({64, 64}).to(world_.device()).requires_grad_(true);
  const auto forward = [](const at::Tensor& in) {
    return at::rrelu(in, 0.1, 0.9, /*training=*/true);
  };
  const at::Tensor plain = GradientOf(x, /*offload=*/false, forward);
  EXPECT_TRUE(SameBytes(plain, GradientOf(x, /*offload=*/true, forward)));
  EXPECT_EQ(stats().offloaded, 3u) << "the input, the noise and the result";
  EXPECT_GT(stats().fetched_bytes, 0u);
}

TEST_P(SavedBeforeWritten, InstanceNormWithRunningStatisticsGivesTheSameGradient) {
  constexpr int64_t kChannels = 512;
  const at::TensorOptions emu(world_.device());
  const at::Tensor x = at::randn({2, kChannels, 4}).to(world_.device()).requires_grad_(true);
  const at::Tensor mean = at::zeros({kChannels}, emu);
  const at::Tensor variance = at::ones({kChannels}, emu);
  const auto forward = [&](const at::Tensor& in) {
    return at::instance_norm(in, {}, {}, mean, variance, /*use_input_stats=*/true, 0.1, 1e-5,
                             /*cudnn_enabled=*/false);
  };
  const at::Tensor plain = GradientOf(x, /*offload=*/false, forward);
  EXPECT_TRUE(SameBytes(plain, GradientOf(x, /*offload=*/true, forward)));
  EXPECT_GE(stats().offloaded, 2u) << "the input and the repeated statistics";
}

INSTANTIATE_TEST_SUITE_P(Modes, SavedBeforeWritten,
                         ::testing::Combine(::testing::Bool(), ::testing::Bool()),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) ? "Overlap" : "Blocking") +
                                  (std::get<1>(info.param) ? "Verified" : "");
                         });

// It waits for a batch, after its first operator's return, when the second one saves it.
TEST(SavedBeforeWrittenMemory, ATensorThatIsPendingWaitsForTheNextOperatorThatSavesIt) {
  EmuWorld world(MachineOptions(), SmallWindows(256 * kKiB));
  const at::Tensor carrier = NewCarrier(world);
  std::vector<at::Tensor> seen;
  std::vector<at::Tensor> seen_next;
  const at::Tensor y = InScope(world.session(), carrier, [&](at::Tensor& y) {
    at::Tensor noise = Activation(carrier, {40, 256}, 1);
    y = Observe(y, {noise}, &seen_next);
    y = Observe(y, {Activation(carrier, {40, 256}, 2)}, &seen_next);
    // With the tensor before it, it would fill a batch.
    y = Observe(y, {noise, Activation(carrier, {4, 256}, 3)}, &seen);
    noise.variable_data().copy_(ActivationValues({40, 256}, 7));
    noise.reset();
  });
  world.session()->FreeDeviceMemory(0);
  y.backward();
  EXPECT_EQ(world.session()->GetStats().shared, 1u);
  EXPECT_TRUE(SameBytes(seen.at(0), ActivationValues({40, 256}, 7)));
}

// A checksum needs device memory. Without it, the tensor stays on the device, as after any other
// failure of its copy; forward does not fail.
TEST(SavedBeforeWrittenMemory, AChecksumWithoutDeviceMemoryKeepsTheTensorOnTheDevice) {
  EmuWorld world(MachineOptions(), OptionsOf(/*overlap=*/true, /*verify=*/true));
  EmulatedMachine& machine = world.machine();
  const at::Tensor carrier = NewCarrier(world);
  std::vector<at::Tensor> seen;
  at::Tensor y;
  {
    const OffloadScope scope(world.session());
    y = Observe(carrier, {Activation(carrier, {256, 256}, 1)}, &seen);
    ASSERT_TRUE(machine.SetMemoryLimit(0, machine.memory_stats(0).in_use_bytes + 4 * kKiB).ok());
  }
  ASSERT_TRUE(machine.SetMemoryLimit(0, machine.options().memory_bytes).ok());
  EXPECT_EQ(world.session()->GetStats().offloaded, 0u);
  EXPECT_EQ(world.session()->GetStats().kept_copy_failed, 1u);
  y.backward();
  EXPECT_TRUE(SameBytes(seen.at(0), ActivationValues({256, 256}, 1)));
}

}  // namespace
}  // namespace pinion::testing
