// Checks graphs that are kept, dropped, interleaved, or interrupted by an exception. TRL's and
// torchtune's shared tables go stale in these cases; here handles own their data.

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/sigmoid.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/tests/hooks/activations/graphs_fixture.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace {

using OffloadGraphs = GraphsFixture;

at::Tensor Throw(const at::Tensor& /*grad*/, const UnpackSaved& /*unpack*/) {
  throw std::runtime_error("in the middle of backward");
}

// --- Several backwards, several graphs ---

// TRL and torchtune delete an entry at unpack, so a second backward raises "unknown id".
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

// TRL resets its ids at each context entry. With two forwards of equal shapes, the first one's
// backward silently got the second's tensors, and the second's raised.
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

// In packing order, an older graph's last tensors precede this graph's first. Prefetching must not
// fetch them in every step.
TEST_F(OffloadGraphs, NothingOfAnOlderGraphIsFetchedAhead) {
  const TestNet older(world_.device(), at::kFloat, SeededNet(1));
  const TestNet net(world_.device(), at::kFloat, SeededNet(2));
  const Gradients plain = TrainStep(older, nullptr);
  TrainStep(net, world_.session());
  const OffloadStats alone = stats();
  ASSERT_GT(alone.prefetch_hits, 0u);

  const at::Tensor kept = Forward(older);
  TrainStep(net, world_.session());
  EXPECT_EQ(stats().fetched_bytes, 2 * alone.fetched_bytes);
  kept.backward();
  ExpectSameGradients(plain, TakeGradients(older, kept));
}

// In TRL 5 GB and more stayed on the device between steps (trl#5700).
TEST_F(OffloadGraphs, AGraphThatIsDroppedWithoutBackwardReturnsEverything) {
  const TestNet net(world_.device(), at::kFloat);
  const uint64_t before = device_bytes();
  at::Tensor loss = Forward(net);
  EXPECT_GT(stats().live_handles, 0u);
  loss.reset();
  world_.ExpectNothingLeft();
  EXPECT_EQ(device_bytes(), before);
}

// A scope around a whole evaluation drops one graph after another.
TEST_F(OffloadGraphs, AGraphThatIsDroppedInItsScopeIsForgottenBeforeTheScopeEnds) {
  const at::Tensor tensor = activation({16, 16});  // small enough to wait for a batch
  const auto references = [&] { return tensor.storage().getWeakStorageImpl().weak_use_count(); };
  const auto before = references();
  const OffloadScope scope(world_.session());
  at::Tensor y = Observe(carrier_, {tensor}, &seen_);
  EXPECT_GT(references(), before);
  y.reset();
  EXPECT_EQ(references(), before);
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
  EXPECT_TRUE(session.expired()) << "the test's premise";
  loss.backward();
  ExpectSameGradients(plain, TakeGradients(net, loss));
}

// A node that saves its own output would be kept alive by a hook that keeps the tensor itself.
TEST_F(OffloadGraphs, ANodeThatSavesItsOwnOutputIsNotLeaked) {
  for (const int64_t size : {16, 4096}) {  // kept on the device; offloaded
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
  bool broken = true;
  std::vector<at::Tensor> seen_early;
  std::vector<at::Tensor> seen_late;
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    y = Observe(y, {activation({64, 64}, 1)}, &seen_early);
    y = Probe(y, {activation({64, 64}, 2)}, [&](const at::Tensor& grad, const UnpackSaved& unpack) {
      if (broken) throw std::runtime_error("in the middle of backward");
      seen_late = unpack();
      return grad;
    });
    y = Observe(y, {activation({64, 64}, 3)}, &seen_late);
  });
  EXPECT_THROW(y.backward({}, /*retain_graph=*/true), std::runtime_error);
  EXPECT_TRUE(seen_early.empty());
  broken = false;
  y.backward();
  EXPECT_TRUE(SameBytes(seen_early[0], ActivationValues({64, 64}, 1)));
  EXPECT_TRUE(SameBytes(seen_late[0], ActivationValues({64, 64}, 2)));
}

// The graph is kept for another attempt, which may never come.
TEST_F(OffloadGraphs, ABackwardThatThrowsKeepsNothingThatItFetched) {
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    y = Observe(y, {activation({64, 64}, 1)}, &seen_);
    y = Probe(y, {}, Throw);
    y = Observe(y, {activation({64, 64}, 2)}, &seen_);
    y = Observe(y, {activation({64, 64}, 3)}, &seen_);
  });
  const uint64_t before = device_bytes();
  EXPECT_THROW(y.backward({}, /*retain_graph=*/true), std::runtime_error);
  seen_.clear();
  EXPECT_TRUE(Soon([&] { return stats().prefetches_dropped == 1; })) << stats().ToString();
  EXPECT_TRUE(Soon([&] { return device_bytes() == before; }));
}

TEST_F(OffloadGraphs, AGraphWhoseBackwardThrewReturnsEverything) {
  const TestNet net(world_.device(), at::kFloat, SeededNet(1));
  const uint64_t before = device_bytes();
  at::Tensor loss = InScope(world_.session(), [&] {
    const at::Tensor gate = Probe(carrier_, {}, Throw);
    return at::mul(net.Loss(), gate);
  });
  EXPECT_THROW(loss.backward(), std::runtime_error);
  TakeGradients(net, loss);
  loss.reset();
  world_.ExpectNothingLeft();
  // The worker that threw finishes shortly after backward() returns.
  EXPECT_TRUE(Soon([&] { return device_bytes() == before; }));
}

// --- Scopes ---

TEST_F(OffloadGraphs, TheInnermostScopeWins) {
  at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    y = Observe(y, {activation({64, 64}, 1)}, &seen_);
    EXPECT_EQ(stats().packed, 1u);
    {
      const NoOffloadScope off;
      y = Observe(y, {activation({64, 64}, 2)}, &seen_);
      EXPECT_EQ(stats().packed, 1u);
      {
        const OffloadScope on(world_.session());
        y = Observe(y, {activation({64, 64}, 3)}, &seen_);
        EXPECT_EQ(stats().packed, 2u);
      }
      y = Observe(y, {activation({64, 64}, 4)}, &seen_);
      EXPECT_EQ(stats().packed, 2u);
    }
    y = Observe(y, {activation({64, 64}, 5)}, &seen_);
  });
  y = Observe(y, {activation({64, 64}, 6)}, &seen_);
  EXPECT_EQ(stats().packed, 3u);
  EXPECT_EQ(stats().offloaded, 3u);
  y.backward();
  EXPECT_TRUE(SameBytes(seen_[0], ActivationValues({64, 64}, 1)));
}

TEST_F(OffloadGraphs, AScopeOfADisabledSessionSwitchesOffloadOff) {
  OffloadOptions disabled = SmallWindows();
  disabled.enabled = false;
  const auto off_session = world_.NewSession(disabled);
  const OffloadScope scope(world_.session());
  const OffloadScope off(off_session);
  Observe(carrier_, {activation({64, 64})}, &seen_);
  EXPECT_EQ(stats().packed, 0u);
}

}  // namespace
}  // namespace pinion::testing
