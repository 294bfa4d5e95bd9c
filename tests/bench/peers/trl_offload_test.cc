#include "pinion/bench/peers/trl_offload.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/device/emulated/faults.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/tests/bench/peers/peer_steps.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace trl_offload_test {

constexpr NetShape kNet = {.layers = 6, .tokens = 64, .channels = 32};

std::shared_ptr<TrlOffload> NewTrl(const TestNet& net, c10::Device device) {
  return std::make_shared<TrlOffload>(TrlOptions{.parameters = net.parameters()}, device);
}

Gradients TrainStepInside(const TestNet& net, const std::shared_ptr<TrlOffload>& trl) {
  const TrlScope scope(trl);
  SeedGenerators();
  const at::Tensor loss = net.Loss();
  loss.backward();
  return TakeGradients(net, loss);
}

// A detected race aborts the test.
class TrlOffloadInAnyOrderTest : public ::testing::TestWithParam<EffectSchedule> {
 protected:
  EmuWorld world_{MachineOptions(GetParam())};
};

INSTANTIATE_TEST_SUITE_P(, TrlOffloadInAnyOrderTest,
                         ::testing::Values(EffectSchedule::kEarly, EffectSchedule::kLate,
                                           EffectSchedule::kRandom));

TEST_P(TrlOffloadInAnyOrderTest, GradientsOfATransformerAreThoseWithoutIt) {
  const TestNet net(world_.device(), at::kFloat, kNet);
  const Gradients plain = TrainStepWith(net, nullptr);
  const auto trl = NewTrl(net, world_.device());
  for (int step = 0; step < 3; ++step) ExpectSameGradients(plain, TrainStepInside(net, trl));
  EXPECT_GT(trl->GetStats().fetched_bytes, 0u);
}

TEST_P(TrlOffloadInAnyOrderTest, GradientsOfConvolutionsAreThoseWithoutIt) {
  const ConvNet net(world_.device());
  net.Loss().backward();
  const std::vector<at::Tensor> plain = net.TakeGradients();
  const auto trl = std::make_shared<TrlOffload>(
      TrlOptions{.max_fwd_stash_size = 1, .parameters = net.parameters()}, world_.device());
  {
    const TrlScope scope(trl);
    net.Loss().backward();
  }
  EXPECT_GT(trl->GetStats().fetched_bytes, 0u);
  const std::vector<at::Tensor> gradients = net.TakeGradients();
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(SameBytes(plain[i], gradients[i])) << i;
}

class TrlOffloadTest : public ::testing::Test {
 protected:
  // Saves `count` tensors of 4 KiB without external references.
  at::Tensor SaveTensors(int count) {
    at::Tensor y = carrier_;
    for (int i = 0; i < count; ++i) {
      y = Probe(y, {at::ones({1024}, carrier_.options())},
                [](const at::Tensor& grad, const UnpackSaved& unpack) {
                  unpack();
                  return grad;
                });
    }
    return y;
  }
  std::shared_ptr<TrlOffload> NewTrl() const {
    return std::make_shared<TrlOffload>(TrlOptions{.parameters = {carrier_}}, world_.device());
  }

  EmuWorld world_;
  const at::Tensor carrier_ =
      at::ones({4}, at::TensorOptions(world_.device())).requires_grad_(true);
};

TEST_F(TrlOffloadTest, WhatItSaysThatItMovesIsWhatTheLinkHasMoved) {
  const TestNet net(world_.device(), at::kFloat, kNet);
  const auto trl = trl_offload_test::NewTrl(net, world_.device());
  ASSERT_TRUE(world_.Synchronize().ok());
  world_.machine().ResetTimeStats(0);
  std::optional<TrlScope> scope(trl);
  net.Loss().backward();
  ASSERT_TRUE(world_.Synchronize().ok());
  const TimeStats moved = world_.machine().time_stats(0);
  EXPECT_GT(trl->GetStats().offloaded_bytes, trl->GetStats().fetched_bytes);
  EXPECT_EQ(trl->GetStats().offloaded_bytes, moved.d2h_bytes);
  EXPECT_EQ(trl->GetStats().fetched_bytes, moved.h2d_bytes);
}

TEST_F(TrlOffloadTest, ThePeakOfDeviceMemoryFalls) {
  const TestNet net(world_.device(), at::kFloat, kNet);
  const uint64_t before = world_.device_bytes();
  world_.ResetPeak();
  TrainStepWith(net, nullptr);
  const uint64_t plain = world_.peak_device_bytes() - before;
  world_.ResetPeak();
  TrainStepInside(net, trl_offload_test::NewTrl(net, world_.device()));
  EXPECT_LT(world_.peak_device_bytes() - before, plain * 2 / 3);
}

TEST_F(TrlOffloadTest, TensorsOf1024BytesLeaveAndSmallerOnesStay) {
  const auto trl = NewTrl();
  const TrlScope scope(trl);
  const auto bytes = [this](int64_t size) {
    return at::ones({size}, carrier_.options().dtype(at::kByte).requires_grad(false));
  };
  std::vector<at::Tensor> seen;
  Observe(carrier_, {bytes(1023)}, &seen);
  EXPECT_EQ(trl->GetStats().offloaded_bytes, 0u);
  Observe(carrier_, {bytes(1024)}, &seen);
  EXPECT_EQ(trl->GetStats().offloaded_bytes, 1024u);
}

TEST_F(TrlOffloadTest, TheLastFiveSavedTensorsAreStillOnTheDevice) {
  const TrlScope scope(NewTrl());
  const uint64_t before = world_.device_bytes();
  const at::Tensor y = SaveTensors(5);
  const uint64_t with_five = world_.device_bytes();
  EXPECT_GE(with_five - before, 5u * 4096);
  const at::Tensor z = SaveTensors(9);
  EXPECT_LT(world_.device_bytes() - with_five, 4096u);
}

TEST_F(TrlOffloadTest, OnlyWhatTheFirstNodeOfBackwardReadsIsStillThere) {
  const auto trl = NewTrl();
  const TrlScope scope(trl);
  SaveTensors(7).sum().backward();
  EXPECT_EQ(trl->GetStats().offloaded_bytes, 7u * 4096);
  EXPECT_EQ(trl->GetStats().fetched_bytes, 6u * 4096);
}

TEST_F(TrlOffloadTest, ALaterStepPinsNothing) {
  const auto trl = NewTrl();
  const auto step = [&] {
    const TrlScope scope(trl);
    SaveTensors(7).sum().backward();
  };
  step();
  const uint64_t pins = world_.machine().calls(DeviceCall::kPin);
  EXPECT_GT(pins, 0u);
  step();
  EXPECT_EQ(world_.machine().calls(DeviceCall::kPin), pins);
}

// TRL's unpack deletes the saved tensor, so retain_graph does not work (TRL's tracker).
TEST_F(TrlOffloadTest, AKeptGraphCannotBeReadAgain) {
  const TrlScope scope(NewTrl());
  const at::Tensor y = SaveTensors(1).sum();
  y.backward({}, /*retain_graph=*/true);
  try {
    y.backward();
    FAIL() << "the second backward has read what is gone";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("untracked tensor with id 1"), std::string::npos);
  }
}

// Entering TRL's context restarts its numbering, so an earlier graph silently reads tensors of the
// next forward (TRL's tracker).
TEST_F(TrlOffloadTest, AGraphFromAnEarlierScopeReadsTheTensorsOfTheNextOne) {
  const auto trl = NewTrl();
  std::vector<at::Tensor> seen;
  at::Tensor y;
  {
    const TrlScope scope(trl);
    y = Observe(carrier_, {at::ones({1024}, world_.device())}, &seen);
  }
  const TrlScope scope(trl);
  std::vector<at::Tensor> other;
  const at::Tensor z = Observe(carrier_, {at::ones({1024}, world_.device()) * 2}, &other);
  y.sum().backward();
  ASSERT_EQ(seen.size(), 1u);
  EXPECT_EQ(seen[0][0].item<float>(), 2);
}

// TRL records a read tensor on the compute stream only if it is a view, which it tells from the
// storage's use count. Memory that a node keeps returns to the copy stream while the compute stream
// still reads it.
TEST(TrlOffloadRaceTest, ReadingAKeptTensorAfterItsNodeHasRunIsARace) {
  EmulatedOptions machine = MachineOptions();
  machine.abort_on_race = false;
  EmuWorld world(machine);
  const at::Tensor carrier = at::ones({4}, at::TensorOptions(world.device())).requires_grad_(true);
  const TrlScope scope(std::make_shared<TrlOffload>(
      TrlOptions{.max_fwd_stash_size = 1, .parameters = {carrier}}, world.device()));
  std::vector<at::Tensor> kept;
  const auto save = [&](const at::Tensor& y) {
    return Observe(y, {at::ones({1024}, world.device())}, &kept);
  };
  save(save(carrier)).sum().backward();
  ASSERT_EQ(kept.size(), 1u);
  EXPECT_TRUE(world.machine().races().empty());
  const at::Tensor twice = kept[0] * 2;
  kept.clear();
  ASSERT_EQ(world.machine().races().size(), 1u);
  EXPECT_NE(world.machine().races()[0].find("the free"), std::string::npos);
}

using TrlOffloadDeathTest = TrlOffloadTest;

TEST_F(TrlOffloadDeathTest, AStashOfNothingIsRefused) {
  EXPECT_DEATH(TrlOffload(TrlOptions{.max_fwd_stash_size = 0}, world_.device()),
               "max_fwd_stash_size is 0, and must be at least 1");
}

}  // namespace trl_offload_test
}  // namespace pinion::testing
