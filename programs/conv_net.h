// A residual network for small images in plain torch::nn, without knowledge of offloading. Its
// residual blocks can be checkpoints. Taps (hooks/attribution/tap.h) are "blocks.1" and so on, and
// "blocks.0" for the first convolution.
//
// Thread safety: as torch::nn::Module.

#ifndef PINION_PROGRAMS_CONV_NET_H_
#define PINION_PROGRAMS_CONV_NET_H_

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>

namespace pinion {

struct ConvNetConfig {
  int64_t width = 64;  // channels of the first stage; each further one has twice as many
  int64_t stages = 3;  // each but the first halves height and width
  int64_t blocks_per_stage = 2;
  int64_t classes = 10;
  // Backward recomputes each residual block. Within a memory target the plan selects blocks and
  // parts of blocks.
  bool checkpoint_blocks = false;
};

// A convolution; stages of blocks, each two convolutions with batch norms and a shortcut; the mean
// over each channel; a linear layer.
class ConvNetImpl : public torch::nn::Module {
 public:
  // Draws the initial weights from torch's CPU generator.
  explicit ConvNetImpl(const ConvNetConfig& config);

  // Maps images [batch, 3, height, width] to logits [batch, classes].
  torch::Tensor forward(const torch::Tensor& images);

 private:
  ConvNetConfig config_;
  torch::nn::ModuleList blocks_;
  torch::nn::Linear head_;
};
TORCH_MODULE(ConvNet);

}  // namespace pinion

#endif  // PINION_PROGRAMS_CONV_NET_H_
