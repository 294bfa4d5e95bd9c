// Saves the inputs of a checkpointed segment, as an operator saves its arguments.
//
//   const auto inputs = std::make_shared<CheckpointInputs>(tensors);  // packs them
//   segment(inputs->Unpack());
//
// Thread safety: that of torch::autograd::SavedVariable.

#ifndef PINION_HOOKS_CHECKPOINT_CHECKPOINT_INPUTS_H_
#define PINION_HOOKS_CHECKPOINT_CHECKPOINT_INPUTS_H_

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <string>
#include <vector>

namespace pinion {

// In no graph. A node gives the saved inputs a sequence number, like an operator's.
class CheckpointInputs : public torch::autograd::Node {
 public:
  explicit CheckpointInputs(const std::vector<at::Tensor>& inputs);

  std::string name() const override { return "PinionCheckpointInputs"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override;

  // Returns the inputs without their history, so that a backward in the segment ends at them.
  std::vector<at::Tensor> Unpack();

 private:
  std::vector<torch::autograd::SavedVariable> saved_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_CHECKPOINT_CHECKPOINT_INPUTS_H_
