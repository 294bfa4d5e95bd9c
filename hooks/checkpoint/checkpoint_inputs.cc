#include "pinion/hooks/checkpoint/checkpoint_inputs.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/variable.h>

#include <cstdint>
#include <memory>

#include "pinion/hooks/autograd/saved_tensor_hooks.h"

namespace pinion {
namespace {

// The grad_fn of inputs that had a history in forward. Such inputs must not be leaves, because a
// segment may change them in place.
class EndOfSegment : public torch::autograd::Node {
 public:
  EndOfSegment() : Node(/*sequence_nr=*/0) {}
  std::string name() const override { return "PinionEndOfCheckpoint"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { return {}; }
};

}  // namespace

CheckpointInputs::CheckpointInputs(const std::vector<at::Tensor>& inputs) {
  for (const at::Tensor& input : inputs) saved_.emplace_back(input, /*is_output=*/false);
}

torch::autograd::variable_list CheckpointInputs::apply(torch::autograd::variable_list&&) {
  TORCH_CHECK(false, "the node that keeps a checkpoint's inputs is in no graph");
}

std::vector<at::Tensor> CheckpointInputs::Unpack() {
  const UserReadScope for_the_segment;
  const std::shared_ptr<Node> end(new EndOfSegment, torch::autograd::deleteNode);
  std::vector<at::Tensor> inputs;
  for (const torch::autograd::SavedVariable& saved : saved_) {
    // Before NoGradGuard: unpack hooks must see whether this backward builds a graph.
    const at::Tensor input = saved.unpack(getptr());
    const at::NoGradGuard no_grad;
    inputs.push_back(input.defined() ? input.detach() : input);
    if (!input.defined() || !input.requires_grad()) continue;
    if (input.is_leaf()) {
      inputs.back().set_requires_grad(true);
    } else {
      const uint32_t number = end->add_input_metadata(inputs.back());
      torch::autograd::impl::set_gradient_edge(inputs.back(), {end, number});
    }
  }
  return inputs;
}

}  // namespace pinion
