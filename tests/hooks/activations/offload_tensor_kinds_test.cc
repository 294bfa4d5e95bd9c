// Checks that tensors other than plain strided ones pass through a scope: nested, quantized, meta,
// and functorch's wrappers. They are restored unchanged, and in-place changes still raise errors.

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/ops/_nested_tensor_from_tensor_list.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/quantize_per_tensor.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/TensorOptions.h>
#include <c10/util/Exception.h>

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/hooks/plan/offload_policy.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace {

using ::testing::HasSubstr;

class OffloadTensorKinds : public OffloadFixture {
 protected:
  // Saves the tensor in a scope, with a plain one that is offloaded, and reads it back.
  at::Tensor SaveAndReadBack(const at::Tensor& tensor) {
    std::vector<at::Tensor> seen;
    std::vector<at::Tensor> seen_plain;
    const at::Tensor y = InScope(world_.session(), carrier_, [&](at::Tensor& y) {
      y = Observe(y, {tensor}, &seen);
      y = Observe(y, {activation({64, 64}, 3)}, &seen_plain);
    });
    y.backward();
    EXPECT_EQ(stats().offloaded, 1u);
    EXPECT_GT(stats().evicted_bytes, 0u);
    EXPECT_TRUE(SameBytes(seen_plain.at(0), ActivationValues({64, 64}, 3)));
    return seen.at(0);
  }
};

at::Tensor NewNested() {
  return at::_nested_tensor_from_tensor_list(
      {ActivationValues({3, 5}, 1), ActivationValues({2, 5}, 2)});
}

TEST_F(OffloadTensorKinds, ANestedTensorPassesThrough) {
  const at::Tensor seen = SaveAndReadBack(NewNested());
  ASSERT_TRUE(seen.is_nested());
  EXPECT_TRUE(SameBytes(seen.unbind()[0], ActivationValues({3, 5}, 1)));
  EXPECT_TRUE(SameBytes(seen.unbind()[1], ActivationValues({2, 5}, 2)));
  EXPECT_EQ(stats().kept_unsupported, 1u);
}

TEST_F(OffloadTensorKinds, AChangeOfANestedTensorRaisesWhatAutogradRaises) {
  const at::Tensor nested = NewNested();
  const at::Tensor y =
      InScope(world_.session(), [&] { return Observe(carrier_, {nested}, &seen_); });
  EXPECT_EQ(stats().kept_unsupported, 1u);
  nested.detach().mul_(2);
  EXPECT_THAT([&] { y.backward(); },
              ::testing::Throws<c10::Error>(::testing::Property(
                  &c10::Error::what, HasSubstr("[Float nested tensor] is at version 1"))));
}

TEST_F(OffloadTensorKinds, AQuantizedTensorPassesThrough) {
  const at::Tensor quantized =
      at::quantize_per_tensor(ActivationValues({32, 32}), 0.5, 3, at::kQInt8);
  const at::Tensor seen = SaveAndReadBack(quantized);
  ASSERT_TRUE(seen.is_quantized());
  EXPECT_EQ(seen.q_scale(), 0.5);
  EXPECT_TRUE(SameBytes(seen.int_repr(), quantized.int_repr()));
  EXPECT_EQ(stats().kept_unsupported, 1u);
}

TEST_F(OffloadTensorKinds, AMetaTensorPassesThrough) {
  const at::Tensor seen = SaveAndReadBack(at::empty({32, 40}, at::TensorOptions(at::kMeta)));
  EXPECT_TRUE(seen.is_meta());
  EXPECT_EQ(seen.sizes(), at::IntArrayRef({32, 40}));
  EXPECT_EQ(stats().kept_unsupported, 1u);
}

// For example a released flat parameter. A copy would read beyond the storage's end.
TEST_F(OffloadTensorKinds, ATensorWhoseStorageWasShrunkPassesThrough) {
  const at::Tensor flat = ActivationValues({64, 40}).to(world_.device());
  flat.storage().unsafeGetStorageImpl()->set_nbytes(flat.nbytes() / 2);
  EXPECT_TRUE(SaveAndReadBack(flat).is_alias_of(flat));
  EXPECT_EQ(stats().kept_unsupported, 1u);
}

TEST_F(OffloadTensorKinds, AViewBehindTheEndOfAShrunkenStoragePassesThrough) {
  const at::Tensor flat = ActivationValues({64, 40}).to(world_.device());
  const at::Tensor end = flat.slice(0, 48);
  flat.storage().unsafeGetStorageImpl()->set_nbytes(flat.nbytes() / 2);
  EXPECT_TRUE(SaveAndReadBack(end).is_alias_of(flat));
  EXPECT_EQ(stats().kept_unsupported, 1u);
}

// LibTorch recognises Python tensors, such as DTensor or torchao's, by this dispatch key. Without
// Python, nothing else can be checked here.
TEST_F(OffloadTensorKinds, ATensorThatDispatchesToPythonPassesThrough) {
  const at::Tensor values = ActivationValues({32, 40}).to(world_.device());
  const auto kind = [&] {
    return ClassifyTensor(values, world_.device().type(), kMinOffloadBytes, nullptr);
  };
  EXPECT_EQ(kind(), TensorKind::kHeldLeaf);
  values.unsafeGetTensorImpl()->set_python_dispatch(true);
  EXPECT_EQ(kind(), TensorKind::kUnsupported);
  values.unsafeGetTensorImpl()->set_python_dispatch(false);
}

// A Python tensor's class and attributes depend on its identity.
TEST_F(OffloadTensorKinds, ANodeGetsTheVeryTensorThatItSavedWhereTheProgramStillHasIt) {
  for (const bool keep_graph : {false, true}) {
    for (const int64_t side : {4, 64}) {  // one that is small and stays, and one that has a record
      SCOPED_TRACE(side);
      const at::Tensor leaf = ActivationValues({side, side}, 1).to(world_.device());
      std::vector<at::Tensor> seen;
      const at::Tensor y = InScope(world_.session(), [&] {
        return Observe(carrier_, {leaf, leaf.t(), leaf.clone()}, &seen);
      });
      y.backward({}, keep_graph);
      EXPECT_TRUE(seen.at(0).is_same(leaf));
      EXPECT_TRUE(seen.at(1).is_alias_of(leaf));
      EXPECT_TRUE(SameBytes(seen.at(1), ActivationValues({side, side}, 1).t().contiguous()));
      EXPECT_TRUE(SameBytes(seen.at(2), ActivationValues({side, side}, 1)));
    }
  }
}

// Autograd then gives the node a copy, which the node may not change.
TEST_F(OffloadTensorKinds, ATensorThatNeedsAGradientOnlySinceItWasSavedIsNotChangedByBackward) {
  for (const int64_t side : {4, 64}) {
    SCOPED_TRACE(side);
    const at::Tensor values = ActivationValues({side, side}, 1);
    const at::Tensor leaf = values.to(world_.device());
    const at::Tensor weight =
        at::ones({side, side}, at::TensorOptions(world_.device())).requires_grad_(true);
    const at::Tensor y = InScope(world_.session(), [&] {
      const ProbeBackward returns_what_it_saved = [](const at::Tensor&, const UnpackSaved& unpack) {
        return unpack()[0];
      };
      return Probe(weight, {leaf}, returns_what_it_saved) +
             Probe(weight, {leaf}, returns_what_it_saved);
    });
    leaf.requires_grad_(true);
    y.sum().backward();
    EXPECT_TRUE(SameBytes(weight.grad(), values * 2));
    weight.mutable_grad().add_(1000);
    EXPECT_TRUE(SameBytes(leaf.detach(), values));
  }
}

// Like vmap: 8 tensors of [32, 40] that look like one.
TEST_F(OffloadTensorKinds, ATensorThatVmapWrapsPassesThrough) {
  const at::Tensor values = ActivationValues({8, 32, 40}).to(world_.device());
  const at::Tensor seen = SaveAndReadBack(at::functorch::makeBatched(values, 0, /*level=*/1));
  const auto* batched = at::functorch::maybeGetBatchedImpl(seen);
  ASSERT_NE(batched, nullptr);
  EXPECT_EQ(seen.sizes(), at::IntArrayRef({32, 40}));
  EXPECT_TRUE(batched->value().is_alias_of(values));
  EXPECT_EQ(stats().kept_unsupported, 1u);
}

}  // namespace
}  // namespace pinion::testing
