#include "pinion/bench/saving_step.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <chrono>
#include <utility>

#include "pinion/allocator/base/check.h"
#include "pinion/bench/null_torch_device.h"
#include "pinion/hooks/autograd/saved_tensor_hooks.h"
#include "pinion/hooks/autograd/torch_bridge.h"

namespace pinion {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Reads saved tensors as LibTorch's own nodes do.
class SavingNode final : public torch::autograd::TraceableFunction {
 public:
  explicit SavingNode(const at::Tensor& gradient) { add_input_metadata(gradient); }

  void Save(const at::Tensor& tensor) { saved_ = SavedVariable(tensor, /*is_output=*/false); }

  variable_list apply(variable_list&& gradients) override {
    PINION_CHECK(saved_.unpack(shared_from_this()).defined());
    return std::move(gradients);
  }
  void release_variables() override { saved_.reset_data(); }

 private:
  SavedVariable saved_;
};

// The end of the chain, which computes nothing.
class FirstNode final : public Node {
 public:
  explicit FirstNode(const at::Tensor& gradient) { add_input_metadata(gradient); }
  variable_list apply(variable_list&& gradients) override { return {}; }
};

class PackerThatDoesNothing final : public SavedTensorPacker {
 public:
  std::unique_ptr<SavedTensor> Pack(const at::Tensor& tensor, const GraphPlace&) override {
    return std::make_unique<Kept>(DetachedAlias(tensor));
  }

 private:
  class Kept final : public SavedTensor {
   public:
    explicit Kept(at::Tensor tensor) : tensor_(std::move(tensor)) {}
    at::Tensor Unpack() override { return tensor_; }

   private:
    const at::Tensor tensor_;
  };
};

}  // namespace

double SavingStep::RunUs(const MakeScope& make_scope) const {
  const at::Tensor gradient = at::ones({1});
  const auto start = std::chrono::steady_clock::now();
  {
    std::shared_ptr<Node> last(new FirstNode(gradient), torch::autograd::deleteNode);
    {
      const std::shared_ptr<void> scope = make_scope();
      for (int i = 0; i < tensors; ++i) {
        const at::Tensor made = NewNullTensor(tensor_bytes);
        torch::autograd::impl::set_gradient_edge(made, {last, 0});
        std::shared_ptr<SavingNode> node(new SavingNode(gradient), torch::autograd::deleteNode);
        node->add_next_edge(Edge(std::move(last), 0));
        node->Save(made);
        last = std::move(node);
      }
    }
    torch::autograd::Engine::get_default_engine().execute(
        {Edge(last, 0)}, {gradient}, /*keep_graph=*/false, /*create_graph=*/false,
        /*accumulate_grad=*/true);
  }
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
      .count();
}

std::shared_ptr<void> HooksThatDoNothing() {
  return std::make_shared<SavedTensorScope>(std::make_shared<PackerThatDoesNothing>());
}

}  // namespace pinion
