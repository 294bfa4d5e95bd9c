// Checks that each tensor returns to its own device, for the stream and the thread that read it.

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/hooks/activations/graphs_fixture.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace {

using OffloadStreams = GraphsFixture;

// TRL restores to the current device instead of the tensor's.
TEST_F(OffloadStreams, EachTensorComesBackToItsOwnDevice) {
  const TestNet on_0(world_.device(0), at::kFloat, SeededNet(1));
  const TestNet on_1(world_.device(1), at::kFloat, SeededNet(2));
  const Gradients plain_0 = TrainStep(on_0, nullptr);
  const Gradients plain_1 = TrainStep(on_1, nullptr);
  const at::Tensor loss = InScope(
      world_.session(), [&] { return at::add(on_0.Loss(), on_1.Loss().to(world_.device(0))); });
  loss.backward();
  ExpectSame(plain_0.parameters, TakeGradients(on_0, loss).parameters);
  ExpectSame(plain_1.parameters, TakeGradients(on_1, loss).parameters);
  EXPECT_GT(world_.session()->GetEngineStats(0).h2d.submitted_bytes, 0u);
  EXPECT_GT(world_.session()->GetEngineStats(1).h2d.submitted_bytes, 0u);
}

// torchtune and TRL assume that all computation is on the default stream of construction time.
TEST_F(OffloadStreams, ForwardAndBackwardMayRunOnAStreamOfTheirOwn) {
  const TestNet net(world_.device(), at::kFloat);
  const Gradients plain = TrainStep(net, nullptr);
  ASSERT_TRUE(world_.Synchronize().ok());
  {
    const c10::StreamGuard guard(world_.NewStream());
    for (int step = 0; step < 2; ++step) {
      ExpectSameGradients(plain, TrainStep(net, world_.session()));
    }
  }
  EXPECT_GT(stats().prefetch_hits, 0u);
}

TEST_F(OffloadStreams, BackwardMayBeCalledOnAnotherStreamThanForward) {
  const TestNet net(world_.device(), at::kFloat);
  const Gradients plain = TrainStep(net, nullptr);
  ASSERT_TRUE(world_.Synchronize().ok());
  SeedGenerators();
  const at::Tensor loss = Forward(net);
  const c10::Stream other = world_.NewStream();
  ASSERT_TRUE(world_.Synchronize().ok());
  {
    const c10::StreamGuard guard(other);
    loss.backward();
    ExpectSameGradients(plain, TakeGradients(net, loss));
  }
}

// The memory belongs to the stream of its allocation and returns to it. The D2H copy is ordered
// after the stream that saved the tensor.
TEST_F(OffloadStreams, AForkThatSavesWhatTheMainStreamAllocatedMayBeJoinedBeforeTheEviction) {
  const c10::Stream main =
      c10::impl::VirtualGuardImpl(world_.device().type()).getStream(world_.device());
  const c10::Stream fork = world_.NewStream();
  const auto join = [](const c10::Stream& from, const c10::Stream& to) {
    c10::Event event(from.device_type());
    event.record(from);
    event.block(to);
  };
  std::vector<at::Tensor> seen_first;
  std::vector<at::Tensor> seen_second;
  at::Tensor first;
  const at::Tensor second = InScope(world_.session(), carrier_, [&](at::Tensor& second) {
    at::Tensor x = activation({64, 64}, 1);
    join(main, fork);
    {
      const c10::StreamGuard guard(fork);
      first = Observe(carrier_, {x}, &seen_first);
    }
    join(fork, main);
    x.reset();
    second = Observe(second, {activation({128, 64}, 2)}, &seen_second);  // evicts x
    for (int i = 0; i < 4; ++i) activation({64, 64}, 7);                 // would reuse its memory
  });
  first.backward();
  join(fork, main);
  EXPECT_TRUE(SameBytes(seen_first[0], ActivationValues({64, 64}, 1)));
}

// A user-defined node may change streams before it unpacks.
TEST_F(OffloadStreams, UnpackingOnAnotherStreamWaitsForWhatItNeeds) {
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
  const at::Tensor held = activation({64, 64}, 1);
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    y = Probe(y, {held}, on_other_stream(&on_device));
    y = Probe(y, {activation({64, 64}, 2)}, on_other_stream(&fetched));
    y = Probe(y, {activation({64, 64}, 3)}, on_other_stream(&fetched));
  });
  y.backward();
  EXPECT_TRUE(SameBytes(on_device[0], ActivationValues({64, 64}, 1)));
  EXPECT_TRUE(SameBytes(fetched[0], ActivationValues({64, 64}, 3)));
  EXPECT_TRUE(SameBytes(fetched[1], ActivationValues({64, 64}, 2)));
}

TEST_F(OffloadStreams, TwoThreadsTrainWithOneSession) {
  constexpr int kThreads = 2;
  constexpr int kSteps = 3;
  std::vector<TestNet> nets;
  std::vector<Gradients> plain;
  for (int i = 0; i < kThreads; ++i) {
    nets.emplace_back(world_.device(), at::kFloat, SeededNet(10 + i));
    plain.push_back(TrainStep(nets[i], nullptr));
  }
  ASSERT_TRUE(world_.Synchronize().ok());
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
