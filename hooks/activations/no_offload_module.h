// A module whose saved tensors stay on the device, around one that has no parameters by which a
// scope could know it (module_heads.h), or one that is no head by its name.
//
//   torch::nn::Sequential model(torch::nn::Linear(8, 8),
//                               pinion::nn::NoOffload(torch::nn::GELU()),
//                               torch::nn::Linear(8, 1));
//
// It takes one tensor and returns one, as the modules of a Sequential do, and may be around a
// Sequential. The parameters' names begin with "module.". A module that takes more opens a
// NoOffloadScope in its forward.
//
// Thread safety, errors: those of the module inside.

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
