// A residual network for small images, as one writes it with torch::nn: nothing in it knows of
// offloading. Its residual blocks can be checkpoints. They are tapped (hooks/attribution/tap.h) as
// "blocks.1" and so on, and the convolution before them as "blocks.0".
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
  // Backward computes each residual block again; within a memory target, those blocks and parts
  // of blocks that the plan chooses.
  bool checkpoint_blocks = false;
};

// A convolution, then stages of blocks of two convolutions with batch norms beside which their
// input passes by, then the mean over each channel and a linear layer.
class ConvNetImpl : public torch::nn::Module {
 public:
  // Draws the initial weights from torch's CPU generator.
  explicit ConvNetImpl(const ConvNetConfig& config);

  // images: [batch, 3, height, width] -> logits [batch, classes].
  torch::Tensor forward(const torch::Tensor& images);

 private:
  ConvNetConfig config_;
  torch::nn::ModuleList blocks_;
  torch::nn::Linear head_;
};
TORCH_MODULE(ConvNet);

}  // namespace pinion

#endif  // PINION_PROGRAMS_CONV_NET_H_
