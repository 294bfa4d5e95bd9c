// Checks that new nodes behave alike in all LibTorch releases.

#include "pinion/hooks/autograd/libtorch_compat.h"

#include <torch/csrc/autograd/edge.h>

#include <utility>

#include "gtest/gtest.h"

namespace pinion::testing {
namespace {

class CountedNode : public torch::autograd::Node {
 public:
  explicit CountedNode(int* alive) : alive_(*alive) { ++alive_; }
  ~CountedNode() override { --alive_; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { return {}; }

 private:
  int& alive_;
};

TEST(MakeNode, TheNewNodeHasOneOwnerAndCanNameIt) {
  int alive = 0;
  NodeRef<CountedNode> node = MakeNode<CountedNode>(&alive);
  EXPECT_EQ(node.use_count(), 1);
  EXPECT_EQ(node->getptr(), NodePtr(node));
  node.reset();
  EXPECT_EQ(alive, 0);
}

TEST(MakeNode, ALongChainIsFreedWithoutRecursion) {
  int alive = 0;
  NodePtr last = MakeNode<CountedNode>(&alive);
  for (int i = 0; i < 300'000; ++i) {
    NodePtr next = MakeNode<CountedNode>(&alive);
    next->add_next_edge(torch::autograd::Edge(std::move(last), 0));
    last = std::move(next);
  }
  EXPECT_EQ(alive, 300'001);
  last.reset();
  EXPECT_EQ(alive, 0);
}

}  // namespace
}  // namespace pinion::testing
