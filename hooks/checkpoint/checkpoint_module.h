// Checkpoints (checkpoint.h) for torch::nn: checkpoint_sequential of torch.utils.checkpoint, and a
// module that checkpoints another module.
//
//   torch::nn::Sequential model(pinion::nn::Checkpoint(Block(64)),
//                               pinion::nn::Checkpoint(Block(64)),
//                               torch::nn::Linear(64, 10));
//   at::Tensor y = pinion::checkpoint_sequential(layers, /*segments=*/4, x);
//
// Thread safety, errors: those of checkpoint().

#ifndef PINION_HOOKS_CHECKPOINT_CHECKPOINT_MODULE_H_
#define PINION_HOOKS_CHECKPOINT_CHECKPOINT_MODULE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "pinion/hooks/autograd/tensor_module.h"
#include "pinion/hooks/checkpoint/checkpoint_options.h"

namespace pinion {

// Runs the modules as `segments` segments of equal length; the last one takes the remainder. Each
// is a checkpoint except the last, which backward needs first. Each module takes a tensor and
// returns one. Throws c10::Error unless 1 <= segments <= modules->size().
at::Tensor checkpoint_sequential(const torch::nn::Sequential& modules, int64_t segments,
                                 const at::Tensor& input, const CheckpointOptions& options = {});

namespace nn {

// Runs `module` as a checkpoint. It takes a tensor and returns one; it may be a Sequential. Its
// parameters' names begin with "module.".
class CheckpointImpl : public torch::nn::Module {
 public:
  explicit CheckpointImpl(TensorModule module, const CheckpointOptions& options = {});

  at::Tensor forward(const at::Tensor& input);
  std::shared_ptr<torch::nn::Module> clone(
      const std::optional<c10::Device>& device = std::nullopt) const override;

 private:
  TensorModule module_;
  CheckpointOptions options_;
};
TORCH_MODULE(Checkpoint);

}  // namespace nn
}  // namespace pinion

#endif  // PINION_HOOKS_CHECKPOINT_CHECKPOINT_MODULE_H_
