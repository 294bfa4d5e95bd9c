// Checks nodes that return a saved tensor as their gradient. A leaf's .grad must have memory of its
// own: not the user's tensor, a parameter, or a tensor that other nodes have saved.

#include <ATen/core/Tensor.h>
#include <ATen/ops/add.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "pinion/device/emulated/emulated_machine.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/autograd/lent_tensors.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace {

at::Tensor ReturnSaved(const at::Tensor&, const UnpackSaved& unpack) { return unpack()[0]; }

class OffloadGradients : public OffloadFixture {
 protected:
  at::Tensor NewLeaf(int64_t side, bool requires_grad) {
    return ActivationValues({side, side}, 3).to(world_.device()).requires_grad_(requires_grad);
  }

  // Returns the gradient of `weight` from a node that returns `saved`, which the caller references.
  at::Tensor GradientThatIs(const at::Tensor& saved, const at::Tensor& weight,
                            bool retain_graph = false) {
    const at::Tensor y =
        InScope(world_.session(), [&] { return Probe(weight, {saved}, ReturnSaved); });
    y.backward(at::ones_like(y), retain_graph);
    return weight.grad();
  }

  void ExpectOwnGradient(const at::Tensor& saved, bool retain_graph) {
    const at::Tensor weight = NewLeaf(saved.size(0), true);
    const at::Tensor before = saved.detach().cpu();
    const at::Tensor grad = GradientThatIs(saved, weight, retain_graph);
    EXPECT_FALSE(grad.is_alias_of(saved));
    EXPECT_TRUE(SameBytes(grad, before));
    grad.zero_();
    EXPECT_TRUE(SameBytes(saved.detach(), before));
  }
};

TEST_F(OffloadGradients, AnInputThatBecomesAGradientIsCopied) {
  for (const bool retain_graph : {false, true}) {
    for (const int64_t side : {8, 32}) {  // too small; externally referenced
      SCOPED_TRACE(std::to_string(side) + (retain_graph ? ", retained" : ""));
      ExpectOwnGradient(NewLeaf(side, false), retain_graph);
    }
  }
  EXPECT_EQ(stats().kept_small, 2u);
  EXPECT_EQ(stats().kept_held, 2u);
}

TEST_F(OffloadGradients, AKeptTensorThatNobodyElseHasBecomesTheGradientItself) {
  const at::Tensor weight = NewLeaf(8, true);
  const void* data = nullptr;
  const at::Tensor y = InScope(world_.session(), [&] {
    const at::Tensor saved = at::ones({8, 8}, at::TensorOptions(world_.device()));
    data = saved.data_ptr();
    return Probe(weight, {saved}, ReturnSaved);
  });
  y.backward(at::ones_like(y));
  EXPECT_EQ(stats().kept_small, 1u);
  EXPECT_EQ(weight.grad().data_ptr(), data);
}

TEST_F(OffloadGradients, WhatALentTensorTakesWithItMaySettleLoansItself) {
  float bytes[4] = {};
  bool gone = false;
  const at::Tensor y = Probe(NewLeaf(8, true), {}, [&](const at::Tensor& grad, const UnpackSaved&) {
    Lend(at::from_blob(bytes, {4},
                       [&](void*) {
                         SettleLoans();
                         gone = true;
                       }),
         /*node_gets_copy=*/false);
    SettleLoans();
    EXPECT_TRUE(gone);
    return grad;
  });
  y.backward(at::ones_like(y));
}

// Callbacks of other users may run after the one that releases aliases.
TEST_F(OffloadGradients, WhatACallbackBorrowsAtTheEndOfABackwardComesBackToo) {
  at::Tensor lent;
  const at::Tensor y = Probe(NewLeaf(8, true), {}, [&](const at::Tensor& grad, const UnpackSaved&) {
    Lend(at::ones({4}), /*node_gets_copy=*/false);
    torch::autograd::Engine::get_default_engine().queue_callback([&] {
      // Lend queues a callback, and LibTorch's list of callbacks may move while this one runs.
      at::Tensor& borrowed = lent;
      borrowed = Lend(at::ones({4}), /*node_gets_copy=*/false);
    });
    return grad;
  });
  y.backward(at::ones_like(y));
  EXPECT_EQ(lent.use_count(), 1u);
}

TEST_F(OffloadGradients, ALentTensorThatIsKeptMayBeDetachedAfterItsBackward) {
  at::Tensor kept;
  const at::Tensor y = Probe(NewLeaf(8, true), {}, [&](const at::Tensor& grad, const UnpackSaved&) {
    kept = Lend(at::ones({4}), /*node_gets_copy=*/true);
    return grad;
  });
  y.backward(at::ones_like(y));
  EXPECT_EQ(kept.use_count(), 1u);
  EXPECT_TRUE(SameBytes(kept.detach(), at::ones({4})));
}

TEST_F(OffloadGradients, ASparseTensorThatBecomesAGradientIsCopied) {
  const at::Tensor values = at::ones({1});
  const at::Tensor sparse = at::sparse_coo_tensor(at::zeros({1, 1}, at::kLong), values, {9});
  const at::Tensor grad = GradientThatIs(sparse, at::ones({9}).requires_grad_(true));
  ASSERT_TRUE(grad.is_sparse());
  grad._values().zero_();
  EXPECT_TRUE(SameBytes(values, at::ones({1})));
}

TEST_F(OffloadGradients, AParameterThatBecomesAGradientIsCopied) {
  for (const bool retain_graph : {false, true}) ExpectOwnGradient(NewLeaf(32, true), retain_graph);
  EXPECT_EQ(stats().kept_parameter, 2u);
}

TEST_F(OffloadGradients, AnActivationThatTheUserHoldsAndThatBecomesAGradientIsCopied) {
  for (const bool retain_graph : {false, true}) {
    ExpectOwnGradient(activation({32, 32}, 5), retain_graph);
  }
  EXPECT_EQ(stats().offloaded, 2u);
  EXPECT_EQ(stats().reused_on_device, 2u);
}

// Two nodes share one fetched tensor. The first returns it as a gradient, to which the engine adds.
TEST_F(OffloadGradients, AFetchedTensorThatOthersReadIsCopied) {
  const at::Tensor weight = NewLeaf(32, true);
  at::Tensor saved = activation({32, 32}, 5);
  const at::Tensor y = InScope(world_.session(), weight, [&](at::Tensor& y) {
    y = Observe(y, {saved}, &seen_);
    y = at::add(y, Probe(weight, {saved}, ReturnSaved));
  });
  saved.reset();
  y.backward(at::ones_like(y));
  EXPECT_EQ(stats().fetched_on_demand, 1u);
  EXPECT_TRUE(SameBytes(seen_.at(0), ActivationValues({32, 32}, 5)));
  EXPECT_TRUE(SameBytes(weight.grad(), ActivationValues({32, 32}, 5).add(1)));
  EXPECT_FALSE(weight.grad().is_alias_of(seen_[0]));
}

// The program references the tensor until the first node has read it. The second returns it as a
// gradient, to which the engine adds. The third must still read the saved bytes.
TEST_F(OffloadGradients, ATensorThatTheUserDropsInBackwardIsCopied) {
  const at::Tensor weight = NewLeaf(32, true);
  const at::Tensor other = NewLeaf(32, true);
  at::Tensor saved = activation({32, 32}, 5);
  const at::Tensor y = InScope(world_.session(), other, [&](at::Tensor& y) {
    y = Observe(y, {saved}, &seen_);
    y = at::add(y, at::mul(weight, 1));
    y = at::add(y, Probe(weight, {saved}, ReturnSaved));
    y = at::add(y, Probe(other, {saved}, [&](const at::Tensor& grad, const UnpackSaved& unpack) {
                  unpack();
                  saved.reset();
                  return grad;
                }));
  });
  y.backward(at::ones_like(y));
  EXPECT_EQ(stats().evicted_not_freed, 1u);
  EXPECT_EQ(stats().reused_on_device, 3u);
  EXPECT_TRUE(SameBytes(seen_.at(0), ActivationValues({32, 32}, 5)));
  EXPECT_TRUE(SameBytes(weight.grad(), ActivationValues({32, 32}, 5).add(1)));
}

// A tensor that only its node needs becomes the gradient or is freed with the node.
TEST_F(OffloadGradients, AFetchedTensorThatNobodyElseNeedsIsNotCopied) {
  const at::Tensor weight = NewLeaf(32, true);
  const at::Tensor y = InScope(world_.session(), [&] {
    return Probe(weight, {activation({32, 32}, 5)},
                 [](const at::Tensor&, const UnpackSaved& unpack) {
                   const at::Tensor saved = unpack()[0];
                   EXPECT_EQ(saved.storage().use_count(), 1u);
                   return saved;
                 });
  });
  y.backward(at::ones_like(y));
  EXPECT_EQ(stats().fetched_on_demand, 1u);
  EXPECT_TRUE(SameBytes(weight.grad(), ActivationValues({32, 32}, 5)));
}

// Aliased memory is released before backward ends: when the next node gets its tensors.
TEST_F(OffloadGradients, WhatWasLentGoesBeforeBackwardEnds) {
  constexpr int kTensors = 8;
  uint64_t most_bytes = 0;
  const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
    for (int i = 0; i < kTensors; ++i) {
      y = Probe(y, {activation({64, 64}, i)},
                [&](const at::Tensor& grad, const UnpackSaved& unpack) {
                  unpack();
                  most_bytes = std::max(most_bytes, world_.machine().memory_stats(0).in_use_bytes);
                  return grad;
                });
    }
  });
  const uint64_t before_bytes = world_.machine().memory_stats(0).in_use_bytes;
  y.backward({}, /*retain_graph=*/true);  // lends all tensors
  EXPECT_GE(stats().fetched_bytes, kTensors * 64u * 64 * 4);
  EXPECT_LT(most_bytes - before_bytes, 4u * 64 * 64 * 4);
}

}  // namespace
}  // namespace pinion::testing
