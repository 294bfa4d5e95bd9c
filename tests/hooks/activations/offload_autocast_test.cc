// Checks training under autocast with recast weights: each step has the same bits as without
// offload, and uses less device memory.

#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/linear.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/support/autocast_region.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/test_net.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace offload_autocast_test {

using ::testing::HasSubstr;

// Large enough that all cast weights but the head's exceed the size limit.
NetShape Shape(uint64_t seed = 1) {
  NetShape shape;
  shape.channels = 32;
  shape.seed = seed;
  return shape;
}
constexpr uint64_t kCasts = 2 * 4;
constexpr uint64_t kCastBytes = 2 * (3 + 1 + 4 + 4) * 32 * 32 * 2;

// Updates the parameters by their gradients, and returns copies of the gradients.
Gradients Step(const TestNet& net, const at::Tensor& loss) {
  Gradients gradients = TakeGradients(net, loss);
  const c10::NoGradGuard no_grad;
  for (size_t i = 0; i < net.parameters().size(); ++i) {
    net.parameters()[i].sub_(gradients.parameters[i].to(loss.device()), 0.1);
  }
  return gradients;
}

struct Ways {
  int micro_batches = 1;
  bool backward_in_region = false;
  bool retain_graph = false;
};

std::vector<Gradients> Train(const TestNet& net, const std::shared_ptr<OffloadSession>& session,
                             int steps, const Ways& ways = {}) {
  SeedGenerators();
  const c10::Device device = net.parameters()[0].device();
  std::vector<Gradients> all;
  for (int step = 0; step < steps; ++step) {
    at::Tensor loss;
    for (int batch = 0; batch < ways.micro_batches; ++batch) {
      std::optional<AutocastRegion> region(device.type());
      loss = InScope(session, [&] { return net.Loss(); });
      if (!ways.backward_in_region) region.reset();
      if (ways.retain_graph) loss.backward({}, /*keep_graph=*/true);
      loss.backward();
    }
    all.push_back(Step(net, loss));
  }
  return all;
}

class OffloadAutocast : public ::testing::Test {
 protected:
  // Trains without offload.
  static std::vector<Gradients> Plain(int steps, const Ways& ways = {}) {
    EmuWorld world;
    return Train(TestNet(world.device(), at::kFloat, Shape()), nullptr, steps, ways);
  }
  static void ExpectSameSteps(const std::vector<Gradients>& expected,
                              const std::vector<Gradients>& actual) {
    ASSERT_EQ(expected.size(), actual.size());
    for (size_t step = 0; step < expected.size(); ++step) {
      SCOPED_TRACE(step);
      ExpectSameGradients(expected[step], actual[step]);
    }
  }
  // Expects the steps without offload, with this many recasts of each cast.
  static void ExpectSameStepsAsPlain(const Ways& ways, uint64_t recasts_of_each) {
    constexpr int kSteps = 4;
    const std::vector<Gradients> plain = Plain(kSteps, ways);
    EmuWorld world(MachineOptions(), SmallWindows(1));
    ExpectSameSteps(
        plain, Train(TestNet(world.device(), at::kFloat, Shape()), world.session(), kSteps, ways));
    const OffloadStats stats = world.QuietStats();
    const uint64_t scopes = kSteps * ways.micro_batches - 1;  // all scopes except the first
    EXPECT_EQ(stats.cast_again, scopes * kCasts);
    EXPECT_EQ(stats.recast, scopes * kCasts * recasts_of_each);
    EXPECT_EQ(stats.packed, stats.offloaded + stats.cast_again + stats.shared + stats.kept());
    world.ExpectNothingLeft();
  }
};

TEST_F(OffloadAutocast, StepsHaveTheBitsThatTheyHaveWithoutOffload) {
  ExpectSameStepsAsPlain({}, 1);
}

TEST_F(OffloadAutocast, CastsThatTheRegionStillHasAreUsedAsTheyAre) {
  ExpectSameStepsAsPlain({.backward_in_region = true}, 0);
}

TEST_F(OffloadAutocast, EachMicroBatchMayHaveARegionOfItsOwn) {
  ExpectSameStepsAsPlain({.micro_batches = 3}, 1);
}

TEST_F(OffloadAutocast, AGraphMayBeReadTwice) { ExpectSameStepsAsPlain({.retain_graph = true}, 2); }

TEST_F(OffloadAutocast, ForwardEndsWithLessOnTheDeviceByTheCasts) {
  const auto bytes_after_forward = [](bool cast_again) {
    OffloadOptions options = SmallWindows(kMiB);  // large enough that nothing is evicted
    options.cast_weights_again = cast_again;
    EmuWorld world(MachineOptions(), options);
    const TestNet net(world.device(), at::kFloat, Shape());
    Train(net, world.session(), 1);
    SeedGenerators();
    const at::Tensor loss = [&] {
      const AutocastRegion region(world.device().type());
      return InScope(world.session(), [&] { return net.Loss(); });
    }();
    EXPECT_TRUE(world.Synchronize().ok());
    return world.device_bytes();
  };
  EXPECT_EQ(bytes_after_forward(false) - bytes_after_forward(true), kCastBytes);
}

// Gradients of gradients: tensors read by the first backward live on in the graph that it makes.
TEST_F(OffloadAutocast, GradientsOfGradientsHaveTheSameBits) {
  const auto run = [](EmuWorld& world, const std::shared_ptr<OffloadSession>& session) {
    at::manual_seed(3);
    const at::Tensor w = at::randn({64, 64}).to(world.device()).requires_grad_();
    const at::Tensor x = at::randn({64, 64}).to(world.device()).requires_grad_();
    std::vector<at::Tensor> results;
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = [&] {
        const AutocastRegion region(world.device().type());
        return InScope(session, [&] {
          return at::linear(at::linear(x, w).sin(), w).to(at::kFloat).pow(2).sum();
        });
      }();
      const auto first = torch::autograd::grad({loss}, {x, w}, {}, std::nullopt,
                                               /*create_graph=*/true);
      (first[0].pow(2).sum() + first[1].pow(2).sum()).backward();
      for (const at::Tensor& gradient : TakeGradients({x, w})) results.push_back(gradient);
      const c10::NoGradGuard no_grad;
      w.mul_(0.9);
    }
    return results;
  };
  std::vector<at::Tensor> plain;
  {
    EmuWorld world;
    plain = run(world, nullptr);
  }
  EmuWorld world(MachineOptions(), SmallWindows(1));
  ExpectSame(plain, run(world, world.session()));
  EXPECT_GT(world.session()->GetStats().recast, 0u);
}

TEST_F(OffloadAutocast, TwoThreadsTrainWithOneSession) {
  constexpr int kThreads = 2;
  constexpr int kSteps = 3;
  const auto run = [](EmuWorld& world, const std::shared_ptr<OffloadSession>& session) {
    std::vector<TestNet> nets;
    for (int i = 0; i < kThreads; ++i) {
      NetShape shape = Shape(10 + i);
      shape.dropout = 0;
      nets.emplace_back(world.device(), at::kFloat, shape);
    }
    std::vector<std::vector<Gradients>> all(kThreads);
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] { all[i] = Train(nets[i], session, kSteps); });
    }
    for (std::thread& thread : threads) thread.join();
    return all;
  };
  std::vector<std::vector<Gradients>> plain;
  {
    EmuWorld world;
    plain = run(world, nullptr);
  }
  EmuWorld world(MachineOptions(), SmallWindows(1));
  const auto offloaded = run(world, world.session());
  for (int i = 0; i < kThreads; ++i) ExpectSameSteps(plain[i], offloaded[i]);
  EXPECT_EQ(world.QuietStats().cast_again, kThreads * (kSteps - 1) * kCasts);
}

// With a target that leaves headroom, the plan keeps casts resident like other tensors.
TEST_F(OffloadAutocast, APlanMayKeepCastsOnTheDevice) {
  if (TestsRunOnGpu()) GTEST_SKIP() << "plans by the emulated device's times";
  constexpr int kSteps = 4;
  const std::vector<Gradients> plain = Plain(kSteps);
  EmuWorld world(MachineOptions(), WithTarget(64 * kMiB));
  const TestNet net(world.device(), at::kFloat, Shape());
  ExpectSameSteps(plain, Train(net, world.session(), kSteps));
  const OffloadStats stats = world.QuietStats();
  EXPECT_GT(stats.kept_as_planned, 0u);
  EXPECT_EQ(stats.recast, 0u) << stats.ToString();
  EXPECT_EQ(stats.packed, stats.offloaded + stats.cast_again + stats.shared + stats.kept());
}

// Casts stay on the device until their region ends. Then the plan recasts, keeps or offloads them.
TEST_F(OffloadAutocast, APlanCastsAgainWhatItHasNoRoomFor) {
  constexpr int kSteps = 6;
  const std::vector<Gradients> plain = Plain(kSteps);
  uint64_t least_bytes = 0;
  {
    EmuWorld world(MachineOptions(), WithTarget(1));
    const TestNet net(world.device(), at::kFloat, Shape());
    world.ResetPeak();
    Train(net, world.session(), kSteps);
    least_bytes = world.peak_device_bytes();
  }
  OffloadOptions options = WithTarget(least_bytes);
  options.link = LinkCalibration();  // too slow to hide any copy
  options.link->d2h = options.link->h2d = {.fixed_us = 10, .gb_per_s = 0.01};
  options.link->d2h_duplex_gb_per_s = options.link->h2d_duplex_gb_per_s = 0.01;
  EmuWorld world(MachineOptions(), options);
  const TestNet net(world.device(), at::kFloat, Shape());
  EXPECT_THAT(world.machine().SetMemoryLimit(0, least_bytes), IsOk());
  ExpectSameSteps(plain, Train(net, world.session(), kSteps));
  const OffloadStats stats = world.QuietStats();
  EXPECT_GT(stats.recast, 0u) << stats.ToString();
  EXPECT_GT(stats.evicted_bytes, 0u);
  EXPECT_GT(stats.prefetch_hits, 0u) << "planned steps fetch ahead";
  EXPECT_THAT(world.session()->Explain(0), HasSubstr("recast: "));
}

}  // namespace offload_autocast_test
}  // namespace pinion::testing
