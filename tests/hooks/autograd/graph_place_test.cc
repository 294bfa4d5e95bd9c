// Checks the graph place that hooks get for a saved tensor against the finished graph: the node
// whose backward reads the tensor, and the node that computed it.

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Node;
using torch::autograd::variable_list;

// A saved tensor that backward read.
struct Read {
  std::string node;  // its class name
  GraphPlace place;
  uint64_t sequence = 0;   // of the reading node
  bool is_output = false;  // of the reading node
};

// Identifies a node by the sequence number that its thread gave it.
using NodeNumber = std::pair<uint64_t, uint64_t>;
NodeNumber NumberOf(const Node& node) { return {node.thread_id(), node.sequence_nr()}; }

class PlacePacker : public SavedTensorPacker {
 public:
  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace& place) override {
    places.push_back(place);
    return std::make_unique<Saved>(*this, tensor, place);
  }

  std::vector<GraphPlace> places;
  std::vector<Read> reads;

 private:
  class Saved : public SavedTensor {
   public:
    Saved(PlacePacker& packer, const at::Tensor& tensor, const GraphPlace& place)
        : packer_(packer), tensor_(DetachedAlias(tensor)), place_(place) {
      if (tensor.grad_fn() != nullptr) made_by_ = NumberOf(*tensor.grad_fn());
    }

    at::Tensor Unpack() override {
      const auto reader = torch::autograd::get_current_node();
      packer_.reads.push_back(
          {reader->name(), place_, reader->sequence_nr() + 1, made_by_ == NumberOf(*reader)});
      return tensor_;
    }

   private:
    PlacePacker& packer_;
    const at::Tensor tensor_;
    const GraphPlace place_;
    std::optional<NodeNumber> made_by_;  // nothing for a leaf
  };
};

// Returns the reads by backward of all tensors that `forward` saves in a scope.
std::vector<Read> ReadsOf(const std::function<at::Tensor()>& forward) {
  const auto packer = std::make_shared<PlacePacker>();
  at::Tensor y;
  {
    const SavedTensorScope scope(packer);
    y = forward();
  }
  y.sum().backward();
  return packer->reads;
}

at::Tensor Parameter(at::IntArrayRef sizes) {
  return (at::arange(1, at::prod(at::tensor(sizes)).item<int64_t>() + 1).to(at::kFloat) / 100)
      .reshape(sizes)
      .requires_grad_(true);
}

class SavesBoth : public torch::autograd::Function<SavesBoth> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    const at::Tensor y = x.exp();
    context->save_for_backward({x, y});
    return y;
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return {gradients[0] * context->get_saved_variables()[1]};
  }
};

at::Tensor ManyOperators() {
  const at::Tensor w = Parameter({8, 8});
  at::Tensor x = at::linear(Parameter({4, 8}), w, Parameter({8}));
  x = at::gelu(at::layer_norm(x, {8}, Parameter({8}), Parameter({8})));
  x = at::dropout(at::softmax(x, -1), 0.5, /*train=*/true) + at::tanh(x) * at::sigmoid(x);
  x = at::exp(x).matmul(w.t()).relu_().add_(1).sqrt_();
  const at::Tensor heads = x.view({1, 2, 2, 8});
  x = at::scaled_dot_product_attention(heads, heads * 2, heads.transpose(1, 2)).reshape({4, 8});
  const at::Tensor image = at::conv2d(x.view({1, 1, 4, 8}), Parameter({2, 1, 3, 3}));
  x = SavesBoth::apply(at::max_pool2d(image, {1, 2}).flatten());
  const at::Tensor sorted = std::get<0>(at::sort(x));
  return at::logsumexp(sorted, 0) + at::norm(x) + at::cumprod(sorted, 0).pow(2).mean() +
         at::cross_entropy_loss(x.view({2, -1}), at::zeros({2}, at::kLong));
}

TEST(GraphPlaceTest, TheNodeIsTheOneThatReadsTheTensorAndAnOutputIsWhatItHasComputed) {
  int inputs = 0;
  int outputs = 0;
  for (const Read& read : ReadsOf(ManyOperators)) {
    SCOPED_TRACE(read.node);
    EXPECT_EQ(read.place.node.thread, std::this_thread::get_id());
    EXPECT_EQ(read.place.node.sequence, read.sequence);
    EXPECT_EQ(read.place.is_output, read.is_output);
    ++(read.is_output ? outputs : inputs);
  }
  EXPECT_GE(inputs, 20);
  EXPECT_GE(outputs, 10);
}

// Returns all places of a step, numbered from the step's beginning.
std::vector<std::pair<std::optional<uint64_t>, bool>> PlacesOfAStep() {
  const auto packer = std::make_shared<PlacePacker>();
  const NodeId begin = CurrentNode();
  {
    const SavedTensorScope scope(packer);
    ManyOperators().backward();
  }
  std::vector<std::pair<std::optional<uint64_t>, bool>> places;
  for (const GraphPlace& place : packer->places) {
    places.emplace_back(NodesSince(begin, place.node), place.is_output);
  }
  return places;
}

TEST(GraphPlaceTest, CountedFromTheStepsBeginningItIsTheSameInEachStep) {
  const auto first = PlacesOfAStep();
  at::exp(Parameter({4}));  // between the steps
  EXPECT_EQ(PlacesOfAStep(), first);
  EXPECT_GE(first.front().first.value(), 1u);
  EXPECT_LE(first.front().first.value(), 8u) << "views of parameters have nodes";
}

// Threads number their nodes independently: each of the two has one node, its first.
TEST(GraphPlaceTest, WhatAnotherThreadHasComputedIsNoOutputOfANodeWithTheSameNumber) {
  const at::Tensor x = at::ones({4}).requires_grad_(true);
  at::Tensor y;
  std::thread([&] { y = x.neg(); }).join();
  const auto packer = std::make_shared<PlacePacker>();
  std::thread([&] {
    const SavedTensorScope scope(packer);
    y = y.cos();
  }).join();
  ASSERT_EQ(packer->places.size(), 1u);
  EXPECT_EQ(packer->places[0].node.sequence, 1u);
  EXPECT_FALSE(packer->places[0].is_output);
  EXPECT_EQ(NodesSince(CurrentNode(), packer->places[0].node), std::nullopt);
}

class PlaceWatcher : public SavedTensorWatcher {
 public:
  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace& place,
                                    SavedTensorPacker* packer) override {
    places.push_back(place);
    return packer->Pack(tensor, place);
  }
  void OnSegmentKept(const SegmentBegin&, uint32_t) override {}
  void RunAside(absl::FunctionRef<void()> work) override { work(); }

  std::vector<GraphPlace> places;
};

TEST(GraphPlaceTest, AWatcherIsToldThePlaceToo) {
  const auto watcher = std::make_shared<PlaceWatcher>();
  const at::Tensor x = Parameter({4});
  const NodeId begin = CurrentNode();
  const WatchScope watch(watcher);
  const SavedTensorScope scope(std::make_shared<PlacePacker>());
  x.neg().exp();
  ASSERT_EQ(watcher->places.size(), 1u);
  EXPECT_EQ(NodesSince(begin, watcher->places[0].node), 2u);
  EXPECT_TRUE(watcher->places[0].is_output);
}

// --- Where another node is created between that of the operator and the save ---

class BuildsAGraph : public torch::autograd::Function<BuildsAGraph> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x) {
    {
      const at::AutoGradMode enabled(true);
      x.detach().requires_grad_(true).neg();
    }
    return SavesBoth::forward(context, x);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    return SavesBoth::backward(context, std::move(gradients));
  }
};

TEST(GraphPlaceLimits, AForwardThatBuildsAGraphSavesForItsYoungestNode) {
  const std::vector<Read> reads = ReadsOf([] { return BuildsAGraph::apply(Parameter({4})); });
  ASSERT_EQ(reads.size(), 2u);
  for (const Read& read : reads) {
    EXPECT_EQ(read.place.node.sequence, read.sequence + 1);
    EXPECT_FALSE(read.place.is_output);
  }
  EXPECT_TRUE(reads[1].is_output);
}

TEST(GraphPlaceLimits, AViewWhoseBaseWasWrittenIsTakenForAnOutputOfItsNewNode) {
  const std::vector<Read> reads = ReadsOf([] {
    const at::Tensor base = Parameter({2, 4}).neg();
    const at::Tensor view = base[0];
    base.add_(1);
    return view.cos();
  });
  ASSERT_EQ(reads.size(), 1u);
  EXPECT_EQ(reads[0].place.node.sequence, reads[0].sequence + 1);
  EXPECT_TRUE(reads[0].place.is_output);
  EXPECT_FALSE(reads[0].is_output);
}

TEST(GraphPlaceLimits, AnOperatorInPlaceOnAViewSavesItsOutputForAYoungerNode) {
  const std::vector<Read> reads = ReadsOf([] {
    const at::Tensor base = Parameter({2, 4}).neg();
    base[0].exp_();
    return base;
  });
  ASSERT_EQ(reads.size(), 1u);
  EXPECT_GT(reads[0].place.node.sequence, reads[0].sequence);
  EXPECT_TRUE(reads[0].place.is_output);
}

}  // namespace
}  // namespace pinion
