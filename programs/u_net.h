// A U-Net in plain torch::nn, without knowledge of offloading. Its last layers reuse tensors of its
// first ones, so that backward reads them early and late. Its levels can be checkpoints, and are
// tapped (hooks/attribution/tap.h): "down.0" is the finest level on the way down, "up.0" the
// coarsest on the way up.
//
// Thread safety: as torch::nn::Module.

#ifndef PINION_PROGRAMS_U_NET_H_
#define PINION_PROGRAMS_U_NET_H_

#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>

namespace pinion {

struct UNetConfig {
  int64_t channels = 3;
  int64_t width = 32;  // channels of the first level; each further one has twice as many
  int64_t levels = 4;
  // Backward recomputes each level, on the way down and up. Within a memory target the plan selects
  // levels and parts of levels.
  bool checkpoint_levels = false;
};

// Down: two convolutions with group norms per level, and a pool in between. Up: the lower level's
// output is enlarged and joined with the same level's output on the way down, then two convolutions
// follow.
class UNetImpl : public torch::nn::Module {
 public:
  // Draws the initial weights from torch's CPU generator.
  explicit UNetImpl(const UNetConfig& config);

  // Maps images [batch, channels, height, width], divisible by 2^(levels - 1), to the same shape.
  torch::Tensor forward(const torch::Tensor& images);

 private:
  UNetConfig config_;
  torch::nn::ModuleList down_;     // from the finest level to the coarsest
  torch::nn::ModuleList enlarge_;  // from the coarsest to the finest, one less
  torch::nn::ModuleList up_;
  torch::nn::Conv2d last_;
};
TORCH_MODULE(UNet);

}  // namespace pinion

#endif  // PINION_PROGRAMS_U_NET_H_
