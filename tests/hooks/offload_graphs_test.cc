// Whatever becomes of a graph: kept, dropped, interleaved, broken by an exception, run on another
// stream, device or thread. Handles own their data, so there is no state to go stale.

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sum.h>
#include <c10/core/GradMode.h>
#include <c10/core/Storage.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/offload_options.h"
#include "pinion/hooks/offload_session.h"
#include "pinion/hooks/offload_stats.h"
#include "pinion/tests/hooks/emu_fixture.h"
#include "pinion/tests/hooks/probe.h"
#include "pinion/tests/hooks/test_net.h"

namespace pinion::testing {
namespace {

using ::testing::HasSubstr;

NetShape SeededNet(uint64_t seed) {
  NetShape shape;
  shape.layers = 1;
  shape.dropout = 0;
  shape.seed = seed;
  return shape;
}

class OffloadGraphs : public ::testing::Test {
 protected:
  OffloadGraphs() : world_(TwoDevices()) {}

  // In every test: autograd starts its workers once, one for each device that there is then.
  static EmulatedOptions TwoDevices() {
    EmulatedOptions options = MachineOptions();
    options.device_count = 2;
    return options;
  }

  OffloadStats stats() { return world_.session()->GetStats(); }
  uint64_t device_bytes() { return world_.machine().memory_stats(0).in_use_bytes; }
  at::Tensor NewCarrier() {
    return at::ones({1}, at::TensorOptions(world_.device())).requires_grad_(true);
  }
  at::Tensor Forward(const TestNet& net) {
    const OffloadScope scope(world_.session());
    return net.Loss();
  }

  EmuWorld world_;
};

// --- Several backwards, several graphs ---

// TRL and torchtune delete an entry when it is unpacked: a second backward raises "unknown id".
TEST_F(OffloadGraphs, ARetainedGraphRunsBackwardAgain) {
  const TestNet net(world_.device(), at::kFloat);
  const Gradients plain = TrainStep(net, nullptr);
  SeedGenerators();
  const at::Tensor loss = Forward(net);
  for (int i = 0; i < 3; ++i) {
    loss.backward({}, /*retain_graph=*/true);
    ExpectSameGradients(plain, TakeGradients(net, loss));
  }
}

// TRL's context resets its ids at entry, so that two forwards of the same shapes give out the same
// ids: backward of the first got the second's tensors, silently, and the second's raised.
TEST_F(OffloadGraphs, TwoGraphsInFlightGetTheirOwnTensors) {
  const TestNet a(world_.device(), at::kFloat, SeededNet(1));
  const TestNet b(world_.device(), at::kFloat, SeededNet(2));
  const Gradients plain_a = TrainStep(a, nullptr);
  const Gradients plain_b = TrainStep(b, nullptr);
  ASSERT_FALSE(SameGradients(plain_a, plain_b));
  for (const bool a_first : {true, false}) {
    SCOPED_TRACE(a_first ? "first graph first" : "second graph first");
    at::Tensor loss_a = Forward(a);
    at::Tensor loss_b = Forward(b);
    (a_first ? loss_a : loss_b).backward();
    (a_first ? loss_b : loss_a).backward();
    ExpectSameGradients(plain_a, TakeGradients(a, loss_a));
    ExpectSameGradients(plain_b, TakeGradients(b, loss_b));
  }
  world_.ExpectNothingLeft();
}

TEST_F(OffloadGraphs, AGraphThatIsDroppedWithoutBackwardReturnsEverything) {
  const TestNet net(world_.device(), at::kFloat);
  const uint64_t before = device_bytes();
  at::Tensor loss = Forward(net);
  EXPECT_GT(stats().live_handles, 0u);
  loss.reset();
  world_.ExpectNothingLeft();
  EXPECT_EQ(device_bytes(), before);
}

// TRL's tracker grows by each branch whose backward never runs (its
// test_stale_tracker_state_is_cleared_between_forwards).
TEST_F(OffloadGraphs, ABranchThatNeverRunsBackwardLeavesNothingBehind) {
  const TestNet net(world_.device(), at::kFloat, SeededNet(1));
  const Gradients plain = TrainStep(net, nullptr);
  for (int step = 0; step < 3; ++step) {
    {
      const OffloadScope scope(world_.session());
      const at::Tensor loss = net.Loss();
      const at::Tensor unused = net.Loss();
      loss.backward();
      ExpectSameGradients(plain, TakeGradients(net, loss));
    }
    world_.ExpectNothingLeft();
  }
}

TEST_F(OffloadGraphs, AGraphOutlivesItsScopeAndItsSession) {
  const TestNet net(world_.device(), at::kFloat, SeededNet(1));
  const Gradients plain = TrainStep(net, nullptr);
  const std::weak_ptr<OffloadSession> session = world_.session();
  at::Tensor loss = Forward(net);
  world_.DropSession();
  EXPECT_FALSE(session.expired()) << "handles share ownership";
  loss.backward();
  ExpectSameGradients(plain, TakeGradients(net, loss));
  loss.reset();
  EXPECT_TRUE(Soon([&] { return session.expired(); }));
}

// A node that saves its own output would be kept alive by a hook that keeps the tensor itself.
TEST_F(OffloadGraphs, ANodeThatSavesItsOwnOutputIsNotLeaked) {
  for (const int64_t size : {16, 4096}) {  // kept on the device, offloaded
    SCOPED_TRACE("size " + std::to_string(size));
    const at::Tensor x = at::full({size}, 0.5, at::TensorOptions(world_.device()));
    x.requires_grad_(true);
    const uint64_t before = device_bytes();
    {
      const OffloadScope scope(world_.session());
      const at::Tensor y = at::sigmoid(at::sigmoid(x));
    }
    EXPECT_EQ(stats().live_handles, 0u);
    EXPECT_EQ(device_bytes(), before);
  }
  EXPECT_GT(stats().kept_small, 0u);
  EXPECT_GT(stats().offloaded, 0u);
}

// --- Exceptions ---

// TRL's phases and stash survive an exception and break the next step.
TEST_F(OffloadGraphs, AnExceptionInForwardLeavesNothingBehind) {
  const TestNet net(world_.device(), at::kFloat, SeededNet(1));
  const Gradients plain = TrainStep(net, nullptr);
  const uint64_t before = device_bytes();
  EXPECT_THROW(
      {
        const OffloadScope scope(world_.session());
        const at::Tensor loss = net.Loss();
        throw std::runtime_error("in the middle of forward");
      },
      std::runtime_error);
  world_.ExpectNothingLeft();
  EXPECT_EQ(device_bytes(), before);
  ExpectSameGradients(plain, TrainStep(net, world_.session()));
}

TEST_F(OffloadGraphs, BackwardCanBeTriedAgainAfterAnException) {
  const at::Tensor carrier = NewCarrier();
  bool broken = true;
  std::vector<at::Tensor> seen_early;
  std::vector<at::Tensor> seen_late;
  at::Tensor y;
  {
    const OffloadScope scope(world_.session());
    y = Observe(carrier, {Activation(carrier, {64, 64}, 1)}, &seen_early);
    y = Probe(y, {Activation(carrier, {64, 64}, 2)},
              [&](const at::Tensor& grad, const UnpackSaved& unpack) {
                if (broken) throw std::runtime_error("in the middle of backward");
                seen_late = unpack();
                return grad;
              });
    y = Observe(y, {Activation(carrier, {64, 64}, 3)}, &seen_late);
  }
  EXPECT_THROW(y.backward({}, /*retain_graph=*/true), std::runtime_error);
  EXPECT_TRUE(seen_early.empty());
  broken = false;
  y.backward();
  EXPECT_TRUE(SameBytes(seen_early[0], ActivationValues({64, 64}, 1)));
  EXPECT_TRUE(SameBytes(seen_late[0], ActivationValues({64, 64}, 2)));
}

TEST_F(OffloadGraphs, AGraphWhoseBackwardThrewReturnsEverything) {
  const TestNet net(world_.device(), at::kFloat, SeededNet(1));
  const uint64_t before = device_bytes();
  at::Tensor loss;
  {
    const OffloadScope scope(world_.session());
    const at::Tensor carrier = NewCarrier();
    const at::Tensor gate =
        Probe(carrier, {}, [](const at::Tensor& grad, const UnpackSaved&) -> at::Tensor {
          throw std::runtime_error("in the middle of backward");
        });
    loss = at::mul(net.Loss(), gate);
  }
  EXPECT_THROW(loss.backward(), std::runtime_error);
  TakeGradients(net, loss);
  loss.reset();
  world_.ExpectNothingLeft();
  EXPECT_EQ(device_bytes(), before);
}

// --- Other ways to run backward ---

TEST_F(OffloadGraphs, NothingIsPackedWithoutGradients) {
  const TestNet net(world_.device(), at::kFloat);
  const c10::NoGradGuard no_grad;
  Forward(net);
  EXPECT_EQ(stats().packed, 0u);
}

TEST_F(OffloadGraphs, APartialBackwardDropsWhatItFetchedAheadAndDidNotRead) {
  const at::Tensor early = NewCarrier();
  const at::Tensor late = NewCarrier();
  std::vector<at::Tensor> seen;
  at::Tensor y;
  {
    const OffloadScope scope(world_.session());
    y = Observe(early, {Activation(early, {64, 64}, 1), Activation(early, {64, 64}, 2)}, &seen);
    y = Observe(at::mul(y, late), {Activation(early, {64, 64}, 3)}, &seen);
    y = Observe(y, {Activation(early, {64, 64}, 4)}, &seen);
    y = Observe(y, {Activation(early, {64, 64}, 5)}, &seen);
  }
  const uint64_t before = device_bytes();
  torch::autograd::grad({y}, {late}, {}, /*retain_graph=*/true);
  seen.clear();
  EXPECT_GT(stats().prefetches_dropped, 0u);
  EXPECT_TRUE(Soon([&] { return device_bytes() == before; }));
}

TEST_F(OffloadGraphs, AnUnpackedTensorThatTheUserKeepsStaysAsItIs) {
  const at::Tensor carrier = NewCarrier();
  std::vector<at::Tensor> seen;
  at::Tensor y;
  {
    const OffloadScope scope(world_.session());
    y = Observe(carrier, {Activation(carrier, {64, 64}, 1)}, &seen);
    y = Observe(y, {Activation(carrier, {32, 128}, 9)}, &seen);
  }
  std::vector<at::Tensor> kept;
  y.backward();
  kept = std::move(seen);
  y.reset();
  world_.ExpectNothingLeft();
  for (int i = 0; i < 8; ++i) at::full({64, 64}, -1, at::TensorOptions(world_.device()));
  EXPECT_TRUE(SameBytes(kept[0], ActivationValues({64, 64}, 1)));
}

// As activation checkpointing does: forward without a graph, and again, with one, in backward.
at::Tensor Checkpointed(const at::Tensor& x, const at::Tensor& weight) {
  const auto run = [](const at::Tensor& in, const at::Tensor& w) {
    return at::sum(at::pow(at::mul(in, w), 3)).view({1});
  };
  at::Tensor value;
  {
    const c10::NoGradGuard no_grad;
    value = run(x, weight);
  }
  const at::Tensor y =
      Probe(x, {x, weight}, [run](const at::Tensor& grad, const UnpackSaved& unpack) {
        const c10::AutoGradMode with_grad(true);
        const std::vector<at::Tensor> saved = unpack();
        const at::Tensor in = saved[0].detach().requires_grad_(true);
        run(in, saved[1].detach()).backward(at::sum(grad).view({1}));  // reentrant
        return in.grad();
      });
  return at::add(at::mul(at::sum(y), 0), value);
}

// Hooks stay active in backward when it runs inside the scope, as TRL's trainers do: what is
// recomputed is needed at once.
TEST_F(OffloadGraphs, WhatACheckpointRecomputesStaysOnTheDevice) {
  const at::Tensor x = ActivationValues({64, 64}).to(world_.device()).requires_grad_(true);
  const at::Tensor weight = ActivationValues({64, 64}, 3).to(world_.device());
  const auto step = [&](bool offload) {
    std::optional<OffloadScope> scope;
    if (offload) scope.emplace(world_.session());
    const at::Tensor hidden = at::mul(x, 2);
    Probe(hidden, {hidden, weight}, [](const at::Tensor& grad, const UnpackSaved& unpack) {
      return at::mul(grad, unpack()[1]);
    });
    at::sum(Checkpointed(at::mul(hidden, hidden), weight)).backward();
    const at::Tensor grad = x.grad().cpu();
    x.mutable_grad().reset();
    return grad;
  };
  const at::Tensor plain = step(false);
  EXPECT_TRUE(SameBytes(plain, step(true)));
  EXPECT_GT(stats().kept_in_backward, 0u);
  EXPECT_GT(stats().offloaded, 0u);
}

TEST_F(OffloadGraphs, DoubleBackwardGivesTheSameSecondDerivative) {
  const auto second_derivative = [&](bool offload) {
    const at::Tensor x = ActivationValues({32, 32}, 1).to(world_.device()).requires_grad_(true);
    std::optional<OffloadScope> scope;
    if (offload) scope.emplace(world_.session());
    const at::Tensor y = at::sum(at::pow(at::sigmoid(at::mul(x, 0.01)), 3));
    const at::Tensor first =
        torch::autograd::grad({y}, {x}, {}, std::nullopt, /*create_graph=*/true)[0];
    return torch::autograd::grad({at::sum(at::mul(first, first))}, {x})[0].cpu();
  };
  const at::Tensor plain = second_derivative(false);
  EXPECT_TRUE(SameBytes(plain, second_derivative(true)));
  EXPECT_GT(stats().kept_in_backward, 0u);
  world_.ExpectNothingLeft();
}

TEST_F(OffloadGraphs, BackwardInsideABackwardUnpacksItsOwnGraph) {
  const TestNet inner(world_.device(), at::kFloat, SeededNet(2));
  const Gradients plain = TrainStep(inner, nullptr);
  const at::Tensor carrier = NewCarrier();
  std::vector<at::Tensor> seen;
  const at::Tensor inner_loss = Forward(inner);
  at::Tensor y;
  {
    const OffloadScope scope(world_.session());
    y = Observe(carrier, {Activation(carrier, {64, 64}, 1)}, &seen);
    y = Probe(y, {}, [&](const at::Tensor& grad, const UnpackSaved&) {
      inner_loss.backward();
      return grad;
    });
    y = Observe(y, {Activation(carrier, {64, 64}, 2)}, &seen);
  }
  y.backward();
  ExpectSameGradients(plain, TakeGradients(inner, inner_loss));
  EXPECT_TRUE(SameBytes(seen[0], ActivationValues({64, 64}, 1)));
}

TEST_F(OffloadGraphs, AnUnpackOutsideOfBackwardLeavesNothingBehind) {
  const at::Tensor carrier = NewCarrier();
  UnpackSaved unpack;
  std::vector<at::Tensor> seen;
  at::Tensor y;
  {
    const OffloadScope scope(world_.session());
    y = Probe(carrier, {Activation(carrier, {64, 64}, 1)},
              [&](const at::Tensor& grad, const UnpackSaved& unpack_in_backward) {
                unpack = unpack_in_backward;
                return grad;
              });
    y = Observe(y, {Activation(carrier, {64, 64}, 2)}, &seen);
  }
  y.backward({}, /*retain_graph=*/true);
  EXPECT_TRUE(SameBytes(unpack()[0], ActivationValues({64, 64}, 1)));
  y.reset();
  world_.ExpectNothingLeft();
}

// --- Scopes ---

TEST_F(OffloadGraphs, TheInnermostScopeWins) {
  const at::Tensor carrier = NewCarrier();
  std::vector<at::Tensor> seen;
  at::Tensor y;
  {
    const OffloadScope scope(world_.session());
    y = Observe(carrier, {Activation(carrier, {64, 64}, 1)}, &seen);
    EXPECT_EQ(stats().packed, 1u);
    {
      const NoOffloadScope off;
      y = Observe(y, {Activation(carrier, {64, 64}, 2)}, &seen);
      EXPECT_EQ(stats().packed, 1u);
      {
        const OffloadScope on(world_.session());
        y = Observe(y, {Activation(carrier, {64, 64}, 3)}, &seen);
        EXPECT_EQ(stats().packed, 2u);
      }
      y = Observe(y, {Activation(carrier, {64, 64}, 4)}, &seen);
      EXPECT_EQ(stats().packed, 2u);
    }
    y = Observe(y, {Activation(carrier, {64, 64}, 5)}, &seen);
  }
  y = Observe(y, {Activation(carrier, {64, 64}, 6)}, &seen);
  EXPECT_EQ(stats().packed, 3u);
  EXPECT_EQ(stats().offloaded, 3u);
  y.backward();
  EXPECT_TRUE(SameBytes(seen[0], ActivationValues({64, 64}, 1)));
}

TEST_F(OffloadGraphs, AScopeOfADisabledSessionSwitchesOffloadOff) {
  OffloadOptions disabled = SmallWindows();
  disabled.enabled = false;
  const auto off_session = world_.NewSession(disabled);
  const at::Tensor carrier = NewCarrier();
  std::vector<at::Tensor> seen;
  const OffloadScope scope(world_.session());
  const OffloadScope off(off_session);
  Observe(carrier, {Activation(carrier, {64, 64})}, &seen);
  EXPECT_EQ(stats().packed, 0u);
}

// --- Devices, streams and threads ---

// TRL restores to the current device instead of the tensor's.
TEST_F(OffloadGraphs, EachTensorComesBackToItsOwnDevice) {
  const TestNet on_0(world_.device(0), at::kFloat, SeededNet(1));
  const TestNet on_1(world_.device(1), at::kFloat, SeededNet(2));
  const Gradients plain_0 = TrainStep(on_0, nullptr);
  const Gradients plain_1 = TrainStep(on_1, nullptr);
  at::Tensor loss;
  {
    const OffloadScope scope(world_.session());
    loss = at::add(on_0.Loss(), on_1.Loss().to(world_.device(0)));
  }
  loss.backward();
  const Gradients both_0 = TakeGradients(on_0, loss);
  const Gradients both_1 = TakeGradients(on_1, loss);
  for (size_t i = 0; i < plain_0.parameters.size(); ++i) {
    EXPECT_TRUE(SameBytes(plain_0.parameters[i], both_0.parameters[i]));
    EXPECT_TRUE(SameBytes(plain_1.parameters[i], both_1.parameters[i]));
  }
  EXPECT_GT(world_.session()->GetEngineStats(0).h2d.submitted_bytes, 0u);
  EXPECT_GT(world_.session()->GetEngineStats(1).h2d.submitted_bytes, 0u);
}

// torchtune and TRL take the default stream at construction for the stream of all computation.
TEST_F(OffloadGraphs, ForwardAndBackwardMayRunOnAStreamOfTheirOwn) {
  const TestNet net(world_.device(), at::kFloat);
  const Gradients plain = TrainStep(net, nullptr);
  ASSERT_TRUE(world_.machine().SynchronizeDevice(0).ok());
  {
    const c10::StreamGuard guard(world_.NewStream());
    for (int step = 0; step < 2; ++step) {
      ExpectSameGradients(plain, TrainStep(net, world_.session()));
    }
  }
  EXPECT_GT(stats().prefetch_hits, 0u);
}

TEST_F(OffloadGraphs, BackwardMayBeCalledOnAnotherStreamThanForward) {
  const TestNet net(world_.device(), at::kFloat);
  const Gradients plain = TrainStep(net, nullptr);
  ASSERT_TRUE(world_.machine().SynchronizeDevice(0).ok());
  SeedGenerators();
  const at::Tensor loss = Forward(net);
  const c10::Stream other = world_.NewStream();
  ASSERT_TRUE(world_.machine().SynchronizeDevice(0).ok());
  {
    const c10::StreamGuard guard(other);
    loss.backward();
    ExpectSameGradients(plain, TakeGradients(net, loss));
  }
}

// A node of the user's may change streams before it unpacks.
TEST_F(OffloadGraphs, UnpackingOnAnotherStreamWaitsForWhatItNeeds) {
  const at::Tensor carrier = NewCarrier();
  const c10::Stream other = world_.NewStream();
  std::vector<at::Tensor> on_device;
  std::vector<at::Tensor> fetched;
  const auto on_other_stream = [other](std::vector<at::Tensor>* copies) {
    return [other, copies](const at::Tensor& grad, const UnpackSaved& unpack) {
      const c10::StreamGuard guard(other);
      for (const at::Tensor& tensor : unpack()) copies->push_back(tensor.cpu());
      return grad;
    };
  };
  const at::Tensor held = Activation(carrier, {64, 64}, 1);
  at::Tensor y;
  {
    const OffloadScope scope(world_.session());
    y = Probe(carrier, {held}, on_other_stream(&on_device));
    y = Probe(y, {Activation(carrier, {64, 64}, 2)}, on_other_stream(&fetched));
    y = Probe(y, {Activation(carrier, {64, 64}, 3)}, on_other_stream(&fetched));
  }
  y.backward();
  EXPECT_TRUE(SameBytes(on_device[0], ActivationValues({64, 64}, 1)));
  EXPECT_TRUE(SameBytes(fetched[0], ActivationValues({64, 64}, 3)));
  EXPECT_TRUE(SameBytes(fetched[1], ActivationValues({64, 64}, 2)));
}

TEST_F(OffloadGraphs, TwoThreadsTrainWithOneSession) {
  constexpr int kThreads = 2;
  constexpr int kSteps = 3;
  std::vector<TestNet> nets;
  std::vector<Gradients> plain;
  for (int i = 0; i < kThreads; ++i) {
    nets.emplace_back(world_.device(), at::kFloat, SeededNet(10 + i));
    plain.push_back(TrainStep(nets[i], nullptr));
  }
  ASSERT_TRUE(world_.machine().SynchronizeDevice(0).ok());
  for (const bool own_streams : {false, true}) {
    SCOPED_TRACE(own_streams ? "a stream each" : "on one stream");
    std::vector<int> same(kThreads, 0);
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        std::optional<c10::StreamGuard> guard;
        if (own_streams) guard.emplace(world_.NewStream());
        for (int step = 0; step < kSteps; ++step) {
          const at::Tensor loss = Forward(nets[i]);
          loss.backward();
          same[i] += SameGradients(plain[i], TakeGradients(nets[i], loss));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_THAT(same, ::testing::Each(kSteps));
  }
  world_.ExpectNothingLeft();
}

}  // namespace
}  // namespace pinion::testing
