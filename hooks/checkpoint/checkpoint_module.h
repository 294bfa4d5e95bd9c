// Checkpoints (checkpoint.h) for torch::nn: checkpoint_sequential, as torch.utils.checkpoint's, and
// a module that checkpoints another one.
//
//   torch::nn::Sequential model(pinion::nn::Checkpoint(torch::nn::AnyModule(Block(64))),
//                               pinion::nn::Checkpoint(torch::nn::AnyModule(Block(64))),
//                               torch::nn::Linear(64, 10));
//   at::Tensor y = pinion::checkpoint_sequential(layers, /*segments=*/4, x);
//
// Thread safety, errors: as checkpoint()'s.

#ifndef PINION_HOOKS_CHECKPOINT_CHECKPOINT_MODULE_H_
#define PINION_HOOKS_CHECKPOINT_CHECKPOINT_MODULE_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>

#include <cstdint>

#include "pinion/hooks/checkpoint/checkpoint_options.h"

namespace pinion {

// The modules one after the other, in `segments` segments of equal length: each but the last, which
// backward needs at once, is a checkpoint. The last one takes what is over. Each module takes a
// tensor and returns one. Throws c10::Error unless there is a module for each segment.
at::Tensor checkpoint_sequential(const torch::nn::Sequential& modules, int64_t segments,
                                 const at::Tensor& input, const CheckpointOptions& options = {});

namespace nn {

// `module`, which takes a tensor and returns one, as a checkpoint. Its parameters' names begin with
// "module.".
class CheckpointImpl : public torch::nn::Module {
 public:
  explicit CheckpointImpl(torch::nn::AnyModule module, const CheckpointOptions& options = {});

  at::Tensor forward(const at::Tensor& input);

 private:
  torch::nn::AnyModule module_;
  CheckpointOptions options_;
};
TORCH_MODULE(Checkpoint);

}  // namespace nn
}  // namespace pinion

#endif  // PINION_HOOKS_CHECKPOINT_CHECKPOINT_MODULE_H_
