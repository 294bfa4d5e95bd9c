// Checks backward that runs not at all, in part, twice, nested, or for checkpoints.

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/full.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/sum.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/tests/hooks/activations/graphs_fixture.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace {

using OffloadBackward = GraphsFixture;

TEST_F(OffloadBackward, NothingIsPackedWithoutGradients) {
  const TestNet net(world_.device(), at::kFloat);
  const c10::NoGradGuard no_grad;
  Forward(net);
  EXPECT_EQ(stats().packed, 0u);
}

TEST_F(OffloadBackward, APartialBackwardDropsWhatItFetchedAheadAndDidNotRead) {
  const at::Tensor early = NewCarrier();
  const at::Tensor late = NewCarrier();
  const at::Tensor y = InScope(world_.session(), early, [&](at::Tensor& y) {
    y = Observe(y, {Activation(early, {64, 64}, 1), Activation(early, {64, 64}, 2)}, &seen_);
    y = Observe(at::mul(y, late), {Activation(early, {64, 64}, 3)}, &seen_);
    y = Observe(y, {Activation(early, {64, 64}, 4)}, &seen_);
    y = Observe(y, {Activation(early, {64, 64}, 5)}, &seen_);
  });
  const uint64_t before = device_bytes();
  torch::autograd::grad({y}, {late}, {}, /*retain_graph=*/true);
  seen_.clear();
  EXPECT_GT(stats().prefetches_dropped, 0u);
  EXPECT_TRUE(Soon([&] { return device_bytes() == before; }));
}

// A node reads its tensors from first to last, while prefetching goes from last to first. Tensors
// before the current one may have been read already.
TEST_F(OffloadBackward, WhatANodeHasReadIsNotFetchedAgain) {
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    std::vector<at::Tensor> saved;
    for (int i = 0; i < 6; ++i) saved.push_back(activation({64, 64}, i));
    y = Observe(y, saved, &seen_);
    y = Observe(y, {activation({64, 64}, 7)}, &seen_);
  });
  y.backward();
  EXPECT_EQ(stats().prefetches_dropped, 0u);
  EXPECT_LE(stats().fetched_bytes, 6u * 64 * 64 * 4);
}

TEST_F(OffloadBackward, AnUnpackedTensorThatTheUserKeepsStaysAsItIs) {
  at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    y = Observe(y, {activation({64, 64}, 1)}, &seen_);
    y = Observe(y, {activation({32, 128}, 9)}, &seen_);
  });
  std::vector<at::Tensor> kept;
  y.backward();
  kept = std::move(seen_);
  y.reset();
  world_.ExpectNothingLeft();
  for (int i = 0; i < 8; ++i) at::full({64, 64}, -1, at::TensorOptions(world_.device()));
  EXPECT_TRUE(SameBytes(kept[0], ActivationValues({64, 64}, 1)));
}

// A fetched tensor may outlive its node. TRL guesses this from a reference count and calls
// record_stream; here the tensor owns its memory.
TEST_F(OffloadBackward, AViewThatANodeReturnsOfWhatItHasReadStaysAsItIs) {
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    y = Probe(y, {activation({64, 64}, 1)}, [&](const at::Tensor& grad, const UnpackSaved& unpack) {
      unpack();
      for (int i = 0; i < 8; ++i) at::full({64, 64}, -1, grad.options());
      return grad;
    });
    y = Probe(y, {activation({64, 64}, 2)}, [](const at::Tensor&, const UnpackSaved& unpack) {
      return unpack()[0].view({-1}).slice(0, 100, 101);
    });
    for (int i = 0; i < 2; ++i) y = Observe(y, {activation({64, 64}, 3)}, &seen_);
  });
  y.backward();
  EXPECT_GT(stats().fetched_bytes, 0u);
  EXPECT_EQ(carrier_.grad().item<float>(), 102);
}

TEST_F(OffloadBackward, AViewThatARecomputedGraphSavesStaysAsItIs) {
  const at::Tensor weight =
      at::full({4096}, 1.0, at::TensorOptions(world_.device())).requires_grad_(true);
  at::Tensor recomputed;
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    y = Probe(y, {activation({64, 64}, 1)}, [&](const at::Tensor& grad, const UnpackSaved& unpack) {
      unpack();
      for (int i = 0; i < 8; ++i) at::full({64, 64}, -1, grad.options());
      recomputed.backward();  // reentrant
      return grad;
    });
    y = Probe(y, {activation({64, 64}, 2)}, [&](const at::Tensor& grad, const UnpackSaved& unpack) {
      const c10::AutoGradMode with_grad(true);
      recomputed = at::sum(at::mul(weight, unpack()[0].view({-1})));
      return grad;
    });
    for (int i = 0; i < 2; ++i) y = Observe(y, {activation({64, 64}, 3)}, &seen_);
  });
  y.backward();
  EXPECT_GT(stats().fetched_bytes, 0u);
  EXPECT_TRUE(SameBytes(weight.grad(), ActivationValues({4096}, 2)));
}

// Like activation checkpointing: forward runs without a graph, and again with one in backward.
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

// If backward runs inside the scope, as in TRL's trainers, hooks stay active, and recomputed
// tensors are needed immediately.
TEST_F(OffloadBackward, WhatACheckpointRecomputesStaysOnTheDevice) {
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

TEST_F(OffloadBackward, DoubleBackwardGivesTheSameSecondDerivative) {
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

TEST_F(OffloadBackward, BackwardInsideABackwardUnpacksItsOwnGraph) {
  const TestNet inner(world_.device(), at::kFloat, SeededNet(2));
  const Gradients plain = TrainStep(inner, nullptr);
  const at::Tensor inner_loss = Forward(inner);
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    y = Observe(y, {activation({64, 64}, 1)}, &seen_);
    y = Probe(y, {}, [&](const at::Tensor& grad, const UnpackSaved&) {
      inner_loss.backward();
      return grad;
    });
    y = Observe(y, {activation({64, 64}, 2)}, &seen_);
  });
  y.backward();
  ExpectSameGradients(plain, TakeGradients(inner, inner_loss));
  EXPECT_TRUE(SameBytes(seen_[0], ActivationValues({64, 64}, 1)));
}

TEST_F(OffloadBackward, AnUnpackOutsideOfBackwardLeavesNothingBehind) {
  UnpackSaved unpack;
  at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    y = Probe(y, {activation({64, 64}, 1)},
              [&](const at::Tensor& grad, const UnpackSaved& unpack_in_backward) {
                unpack = unpack_in_backward;
                return grad;
              });
    y = Observe(y, {activation({64, 64}, 2)}, &seen_);
  });
  y.backward({}, /*retain_graph=*/true);
  EXPECT_TRUE(SameBytes(unpack()[0], ActivationValues({64, 64}, 1)));
  y.reset();
  world_.ExpectNothingLeft();
}

}  // namespace
}  // namespace pinion::testing
