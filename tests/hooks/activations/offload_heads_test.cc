// Checks that tensors saved by a module's heads stay. module_heads_test.cc checks which parts are.

#include <ATen/SequenceNumber.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/mean.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/hooks/activations/module_heads.h"
#include "pinion/hooks/activations/no_offload_module.h"
#include "pinion/hooks/activations/offload_options.h"
#include "pinion/hooks/activations/offload_session.h"
#include "pinion/hooks/activations/offload_stats.h"
#include "pinion/tests/hooks/activations/offload_fixture.h"
#include "pinion/tests/hooks/support/autocast_region.h"
#include "pinion/tests/hooks/support/emu_fixture.h"
#include "pinion/tests/hooks/support/error_of.h"
#include "pinion/tests/hooks/support/probe.h"
#include "pinion/tests/hooks/support/test_net.h"

namespace pinion::testing {
namespace offload_heads_test {

using ::testing::HasSubstr;

constexpr int64_t kWidth = 64;

class TwoLayersImpl : public torch::nn::Module {
 public:
  TwoLayersImpl()
      : body_(register_module("body", torch::nn::Linear(kWidth, kWidth))),
        head_(register_module("lm_head", torch::nn::Linear(kWidth, 4 * kWidth))) {}

  at::Tensor forward(const at::Tensor& x) {
    return at::mean(at::mul(head_->forward(at::gelu(body_->forward(x))), 0.5));
  }
  const at::Tensor& head_weight() const { return head_->weight; }

 private:
  torch::nn::Linear body_;
  torch::nn::Linear head_;
};
TORCH_MODULE(TwoLayers);

class OffloadHeads : public OffloadFixture {
 protected:
  explicit OffloadHeads(const OffloadOptions& options = SmallWindows(1)) : OffloadFixture(options) {
    model_->to(world_.device());
  }

  at::Tensor activation(int first = 0) { return Activation(carrier_, {32, kWidth}, first); }
  at::Tensor input() { return at::mul(activation(1), 0.01); }
  const at::Tensor& weight() { return model_->head_weight(); }

  // Returns what `forward` returns in a scope that knows the heads.
  template <typename Forward>
  at::Tensor InScopeWith(const torch::nn::Module& module, const ModuleHeads& heads,
                         const Forward& forward) {
    const OffloadScope scope(world_.session(), module, heads);
    return forward();
  }
  // Runs forward in a scope with heads, in a scope with the module alone, or without a scope.
  enum class In { kHeads, kModule, kNothing };
  at::Tensor Loss(In in) {
    std::optional<OffloadScope> scope;
    if (in == In::kHeads) scope.emplace(world_.session(), *model_, heads_);
    if (in == In::kModule) scope.emplace(world_.session(), *model_);
    return model_->forward(input());
  }
  std::vector<at::Tensor> Gradients(In in) {
    Loss(in).backward();
    std::vector<at::Tensor> gradients;
    for (at::Tensor& parameter : model_->parameters()) gradients.push_back(parameter.grad().cpu());
    model_->zero_grad();
    return gradients;
  }
  void ExpectSameGradientsAsWithout() {
    const std::vector<at::Tensor> plain = Gradients(In::kNothing);
    ExpectSame(plain, Gradients(In::kHeads));
  }

  TwoLayers model_;
  // Found before the model moves to the device, where its parameters get other storages.
  const ModuleHeads heads_ = FindHeads(*model_);
};

TEST_F(OffloadHeads, WhatTheHeadSavesStaysAndTheRestLeaves) {
  Loss(In::kModule);
  const OffloadStats all = stats();
  ASSERT_EQ(all.kept_head, 0u);
  const at::Tensor loss = Loss(In::kHeads);
  EXPECT_EQ(stats().kept_head, 1u) << "the layer's input";
  EXPECT_EQ(stats().offloaded - all.offloaded, all.offloaded - 1);
  EXPECT_EQ(stats().packed, stats().offloaded + stats().shared + stats().kept());
}

TEST_F(OffloadHeads, GradientsAreBitwiseTheSame) {
  ExpectSameGradientsAsWithout();
  EXPECT_EQ(stats().kept_head, 1u);
  EXPECT_GT(stats().offloaded, 0u);
  EXPECT_GT(stats().evicted_bytes, 0u);
  EXPECT_GT(stats().fetched_bytes, 0u);
  world_.ExpectNothingLeft();
}

TEST_F(OffloadHeads, TheOrderInWhichANodeSavesDoesNotMatter) {
  for (int at = 0; at < 3; ++at) {
    SCOPED_TRACE(at);
    const OffloadStats before = stats();
    std::vector<at::Tensor> other;
    const at::Tensor y = InScopeWith(*model_, heads_, [&] {
      std::vector<at::Tensor> saved = {activation(1), activation(2)};
      saved.insert(saved.begin() + at, weight().t());
      const at::Tensor first = Observe(carrier_, std::exchange(saved, {}), &seen_);
      return Observe(first, {activation(3)}, &other);
    });
    EXPECT_EQ(stats().kept_head - before.kept_head, 2u);
    EXPECT_EQ(stats().offloaded - before.offloaded, 1u) << "the second node's";
    y.backward();
    EXPECT_TRUE(SameBytes(seen_[at == 0 ? 1 : 0], ActivationValues({32, kWidth}, 1)));
    EXPECT_EQ(stats().fetched_bytes - before.fetched_bytes, 32u * kWidth * 4);
  }
}

TEST_F(OffloadHeads, ATensorThatTheNodeBeforeItHasSavedIsNotCopiedEither) {
  std::vector<at::Tensor> seen_before;
  const at::Tensor y = InScopeWith(*model_, heads_, [&] {
    const at::Tensor hidden = activation(1);
    return Observe(Observe(carrier_, {hidden}, &seen_before), {hidden, weight()}, &seen_);
  });
  EXPECT_EQ(stats().kept_head, 1u);
  EXPECT_EQ(stats().shared, 1u);
  EXPECT_EQ(engine().d2h.submitted_bytes, 0u);
  y.backward();
  EXPECT_TRUE(SameBytes(seen_before[0], ActivationValues({32, kWidth}, 1)));
}

TEST_F(OffloadHeads, ATensorThatHasLeftBeforeStaysOnTheDeviceAsLongAsTheHeadNeedsIt) {
  std::vector<at::Tensor> seen_first;
  std::vector<at::Tensor> seen_other;
  at::Tensor y = InScopeWith(*model_, heads_, [&] {
    const at::Tensor hidden = activation(1);
    const at::Tensor first = Observe(carrier_, {hidden}, &seen_first);
    return Observe(Observe(first, {activation(2)}, &seen_other), {hidden, weight()}, &seen_);
  });
  ASSERT_EQ(stats().offloaded, 2u);
  ASSERT_EQ(stats().evicted_bytes, 2u * 32 * kWidth * 4);
  y.backward();
  EXPECT_TRUE(SameBytes(seen_[0], ActivationValues({32, kWidth}, 1)));
  EXPECT_TRUE(SameBytes(seen_first[0], ActivationValues({32, kWidth}, 1)));
  EXPECT_GE(stats().reused_on_device, 1u) << "the head's";
  seen_.clear();
  seen_first.clear();
  seen_other.clear();
  y.reset();
  world_.ExpectNothingLeft();
}

TEST_F(OffloadHeads, AutocastsCopyOfItsWeightTellsItToo) {
  const auto loss_under_autocast = [&](In in) {
    const AutocastRegion autocast(world_.device().type());
    return Loss(in);
  };
  loss_under_autocast(In::kModule);
  const OffloadStats all = stats();
  const at::Tensor loss = loss_under_autocast(In::kHeads);
  EXPECT_EQ(stats().kept_head, 2u) << "the layer's input and the cast of its weight";
  loss.backward();
  EXPECT_GT(stats().fetched_bytes, all.fetched_bytes);
}

TEST_F(OffloadHeads, AChangeOfWhatItHasSavedRaisesWhatAutogradRaises) {
  for (const bool weight_first : {false, true}) {
    const at::Tensor hidden = activation(1);
    std::vector<at::Tensor> saved = {hidden, weight()};
    if (weight_first) std::swap(saved[0], saved[1]);
    const at::Tensor y =
        InScopeWith(*model_, heads_, [&] { return Observe(carrier_, saved, &seen_); });
    hidden.detach().add_(1);
    EXPECT_THAT(ErrorOf([&] { y.backward(); }), HasSubstr(kInPlaceMessage));
  }
  EXPECT_EQ(stats().kept_head, 2u);
}

// Autocast's cast of its weight is too small to be offloaded.
TEST_F(OffloadHeads, AutocastsCopyOfASmallWeightTellsItToo) {
  torch::nn::Linear head(16, 16);
  torch::nn::Module module;
  module.register_module("lm_head", head);
  module.to(world_.device());
  at::Tensor hidden = Activation(carrier_, {64, 16});
  const at::Tensor y = InScopeWith(module, FindHeads(module), [&] {
    const AutocastRegion autocast(world_.device().type());
    return head->forward(at::gelu(std::exchange(hidden, at::Tensor())));
  });
  EXPECT_EQ(stats().kept_small, 1u) << "the cast";
  EXPECT_EQ(stats().kept_head, 1u) << "the layer's input";
  EXPECT_EQ(stats().offloaded, 1u) << "what goes into gelu";
  at::mean(y).backward();
  EXPECT_GT(stats().fetched_bytes, 0u);
}

// The embedding is a function of the head's weight, with the weight's sizes or another dtype.
TEST_F(OffloadHeads, ATiedEmbeddingIsNoHead) {
  for (const int64_t tokens : {int64_t{32}, kWidth}) {
    for (const bool cast : {false, true}) {
      SCOPED_TRACE(::testing::Message() << tokens << " tokens, cast: " << cast);
      torch::nn::Embedding embedding(kWidth, kWidth);
      torch::nn::Module module;
      module.register_module("lm_head", embedding);
      module.to(world_.device());
      const OffloadStats before = stats();
      const auto maybe_cast = [&](const at::Tensor& x) { return cast ? x.to(at::kBFloat16) : x; };
      const at::Tensor y = InScopeWith(module, FindHeads(module), [&] {
        const at::TensorOptions indices = at::TensorOptions(world_.device()).dtype(at::kLong);
        const at::Tensor hidden =
            at::gelu(maybe_cast(at::embedding(embedding->weight, at::zeros({tokens}, indices))));
        EXPECT_EQ(stats().kept_head - before.kept_head, 0u);
        return at::mm(hidden, maybe_cast(embedding->weight.t()));
      });
      EXPECT_EQ(stats().kept_head - before.kept_head, cast ? 2u : 1u)
          << "what goes into the product";
      EXPECT_EQ(stats().offloaded - before.offloaded, 1u) << "what goes into gelu";
      at::mean(y).backward();
      EXPECT_GT(stats().fetched_bytes, before.fetched_bytes);
    }
  }
}

TEST_F(OffloadHeads, ABufferOfItTellsItToo) {
  auto head = std::make_shared<torch::nn::Module>();
  const at::Tensor scale = head->register_buffer("scale", at::ones({kWidth}));
  torch::nn::Module module;
  module.register_module("head", head);
  module.to(world_.device());
  const at::Tensor y = InScopeWith(module, FindHeads(module), [&] {
    return Observe(carrier_, {activation(1), head->buffers()[0]}, &seen_);
  });
  EXPECT_EQ(stats().kept_head, 1u);
  EXPECT_EQ(stats().kept_parameter, 1u);
  EXPECT_EQ(stats().offloaded, 0u);
}

// Threads number their nodes independently, so two nodes in a scope may have the same number.
TEST_F(OffloadHeads, ANodeOfAnotherThreadWithTheSameNumberIsNoHeads) {
  const at::Tensor hidden = activation(1);
  const at::Tensor other = activation(2);
  std::vector<at::Tensor> other_seen;
  at::Tensor other_y;
  const at::Tensor y = InScopeWith(*model_, heads_, [&] {
    const uint64_t number = at::sequence_number::peek();
    const at::Tensor made = Observe(carrier_, {hidden, weight()}, &seen_);
    std::thread([&, state = at::ThreadLocalState()] {
      const at::ThreadLocalStateGuard guard(state);
      while (at::sequence_number::peek() < number) at::sequence_number::get_and_increment();
      ASSERT_EQ(at::sequence_number::peek(), number);
      other_y = Observe(carrier_, {other}, &other_seen);
    }).join();
    return made;
  });
  EXPECT_EQ(stats().kept_head, 1u);
  EXPECT_EQ(stats().offloaded, 1u) << "the other thread's";
  other_y.backward();
  EXPECT_TRUE(SameBytes(other_seen[0], ActivationValues({32, kWidth}, 2)));
}

TEST_F(OffloadHeads, AnExceptionInTheHeadLeavesNothingBehind) {
  EXPECT_THROW(
      {
        const OffloadScope scope(world_.session(), *model_, heads_);
        const at::Tensor y = Observe(carrier_, {activation(1), weight()}, &seen_);
        throw std::runtime_error("in the head");
      },
      std::runtime_error);
  EXPECT_EQ(stats().kept_head, 1u);
  ExpectSameGradientsAsWithout();
  world_.ExpectNothingLeft();
}

TEST_F(OffloadHeads, AScopeWithoutHeadsInsideOffloadsThem) {
  const at::Tensor loss = InScopeWith(*model_, heads_, [&] { return Loss(In::kModule); });
  EXPECT_EQ(stats().kept_head, 0u);
  EXPECT_GT(stats().offloaded, 0u);
}

// Its input requires no gradient, so the node does not save the weight.
TEST_F(OffloadHeads, AHeadWhoseInputNeedsNoGradientIsNotKnown) {
  torch::nn::Linear head(kWidth, kWidth);
  head->to(world_.device());
  torch::nn::Module module;
  module.register_module("head", head);
  const at::Tensor y =
      InScopeWith(module, FindHeads(module), [&] { return head->forward(activation().detach()); });
  EXPECT_EQ(stats().kept_head, 0u);
  EXPECT_EQ(stats().offloaded, 1u);
}

// The cast of a frozen weight has no history that leads to the weight.
TEST_F(OffloadHeads, AFrozenHeadUnderAutocastIsNotKnownUnlessItIsWrapped) {
  torch::nn::Linear head(kWidth, kWidth);
  head->to(world_.device());
  for (at::Tensor& parameter : head->parameters()) parameter.requires_grad_(false);
  nn::NoOffload wrapped(head);
  torch::nn::Module module;
  module.register_module("lm_head", head);
  const auto offloaded_by = [&](auto& run) {
    const uint64_t before = stats().offloaded;
    const AutocastRegion autocast(world_.device().type());
    InScopeWith(module, FindHeads(module), [&] { return run->forward(at::gelu(activation())); });
    return stats().offloaded - before;
  };
  EXPECT_EQ(offloaded_by(head), 2u) << "what goes into gelu, and the cast";
  EXPECT_EQ(offloaded_by(wrapped), 1u);
  EXPECT_EQ(stats().kept_head, 0u);
}

class OffloadHeadsErrors : public OffloadHeads {
 protected:
  static OffloadOptions OneSegment() {
    OffloadOptions options = SmallWindows(1);
    options.allocator.max_locked_bytes = options.allocator.segment_bytes;
    return options;
  }
  OffloadHeadsErrors() : OffloadHeads(OneSegment()) {}
};

TEST_F(OffloadHeadsErrors, TensorsThatFindNoHostMemoryAreKeptForThatReason) {
  if (TestsRunOnGpu()) GTEST_SKIP() << "a segment of CUDA holds all of them";
  const at::Tensor y = InScopeWith(*model_, heads_, [&] {
    const at::Tensor large = Activation(carrier_, {64, 8192});  // 2 MiB
    return Observe(Observe(carrier_, {large}, &seen_), {activation(), weight()}, &seen_);
  });
  EXPECT_EQ(stats().kept_no_host_memory, 1u);
  EXPECT_EQ(stats().kept_head, 1u);
  y.backward();
}

class PlannedOffloadHeads : public OffloadHeads {
 protected:
  PlannedOffloadHeads() : OffloadHeads(WithTarget(OffloadOptions::kAutoTarget)) {}
};

TEST_F(PlannedOffloadHeads, WithAMemoryTargetThePlanDecides) {
  for (int step = 0; step < 4; ++step) ExpectSameGradientsAsWithout();
  EXPECT_EQ(stats().kept_head, 0u);
  EXPECT_GT(stats().kept_as_planned, 0u);
  EXPECT_GT(stats().offloaded, 0u);
}

// -------------------------------------------------------------------------------- the wrapper

TEST_F(OffloadHeads, WhatAWrappedModuleSavesStays) {
  torch::nn::Linear first(kWidth, kWidth);
  torch::nn::Linear last(kWidth, kWidth);
  torch::nn::Sequential plain(first, torch::nn::GELU(), last);
  torch::nn::Sequential wrapped(first, nn::NoOffload(torch::nn::GELU()), last);
  plain->to(world_.device());
  const at::Tensor x = input();
  const auto packed_by = [&](torch::nn::Sequential& model) {
    const uint64_t before = stats().packed;
    at::Tensor loss;
    {
      const OffloadScope scope(world_.session(), *model);
      loss = at::mean(model->forward(x));
    }
    loss.backward();
    return stats().packed - before;
  };
  const uint64_t plain_packs = packed_by(plain);
  const at::Tensor gradient = plain->parameters()[0].grad().cpu();
  plain->zero_grad();
  EXPECT_EQ(packed_by(wrapped), plain_packs - 1) << "the activation's input";
  EXPECT_TRUE(SameBytes(gradient, wrapped->parameters()[0].grad().cpu()));
  EXPECT_GT(stats().fetched_bytes, 0u);
}

TEST_F(OffloadHeads, AWrapperMayBeAroundASequentialAndHasItsParameters) {
  torch::nn::Sequential inner(torch::nn::GELU(), torch::nn::Linear(kWidth, kWidth));
  nn::NoOffload wrapped(inner);
  EXPECT_TRUE(wrapped->named_parameters().contains("module.1.weight"));
  wrapped->to(world_.device());
  const at::Tensor x = input();
  const OffloadScope scope(world_.session());
  const uint64_t before = stats().packed;
  EXPECT_TRUE(SameBytes(wrapped->forward(x), inner->forward(x)));
  EXPECT_EQ(stats().packed - before, 3u) << "those outside: GELU's input, Linear's and its weight";
}

TEST_F(OffloadHeads, AWrapperCanBeCloned) {
  nn::NoOffload wrapped(torch::nn::Linear(kWidth, kWidth));
  wrapped->to(world_.device());
  wrapped->eval();
  const auto clone = std::dynamic_pointer_cast<nn::NoOffloadImpl>(wrapped->clone());
  EXPECT_EQ(clone->named_parameters().keys(), wrapped->named_parameters().keys());
  EXPECT_FALSE(clone->is_training());
  const at::Tensor x = input();
  const at::Tensor expected = wrapped->forward(x);
  const at::NoGradGuard no_grad;
  wrapped->parameters()[0].zero_();  // the clone has weights of its own
  EXPECT_TRUE(SameBytes(clone->forward(x), expected));
}

}  // namespace offload_heads_test
}  // namespace pinion::testing
