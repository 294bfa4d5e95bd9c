// Wraps a module so that the tensors it saves stay on the device. For modules that an OffloadScope
// cannot recognise as heads (module_heads.h): without parameters, or with another name.
//
//   torch::nn::Sequential model(torch::nn::Linear(8, 8),
//                               pinion::nn::NoOffload(torch::nn::GELU()),
//                               torch::nn::Linear(8, 1));
//
// The wrapped module takes one tensor and returns one; it may be a Sequential. Its parameters'
// names begin with "module.". A module with other arguments opens a NoOffloadScope in its forward
// instead.
//
// Thread safety, errors: those of the wrapped module.

#ifndef PINION_HOOKS_ACTIVATIONS_NO_OFFLOAD_MODULE_H_
#define PINION_HOOKS_ACTIVATIONS_NO_OFFLOAD_MODULE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <optional>

#include "pinion/hooks/autograd/tensor_module.h"

namespace pinion::nn {

class NoOffloadImpl : public torch::nn::Module {
 public:
  explicit NoOffloadImpl(TensorModule module);

  at::Tensor forward(const at::Tensor& input);
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = std::nullopt) const override;

 private:
  TensorModule module_;
};
TORCH_MODULE(NoOffload);

}  // namespace pinion::nn

#endif  // PINION_HOOKS_ACTIVATIONS_NO_OFFLOAD_MODULE_H_
