// Checks that looking up a saved tensor's origin leaves the autograd graph alone.

#include "pinion/hooks/activations/saved_origin.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "gtest/gtest.h"

namespace pinion {
namespace {

using torch::autograd::impl::grad_fn_unsafe;

TEST(SavedOriginTest, AutogradMakesNoNodeForIt) {
  at::Tensor base = at::mul(at::ones({4}).requires_grad_(), 2);
  const at::Tensor view = base.view({2, 2});
  base.add_(1);  // gives the view another node, which autograd creates on request
  const torch::autograd::Node* const before = grad_fn_unsafe(view);
  const SavedOrigin origin(view, /*saver=*/{});
  EXPECT_EQ(grad_fn_unsafe(view), before);
  EXPECT_EQ(origin.MadeBy(), "ViewBackward0");
  EXPECT_NE(view.grad_fn().get(), before) << "the test sees nothing";
}

TEST(SavedOriginTest, NobodyHasMadeALeaf) {
  EXPECT_EQ(SavedOrigin(at::ones({4}), /*saver=*/{}).MadeBy(), "");
}

}  // namespace
}  // namespace pinion
