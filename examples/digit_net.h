// A small convolutional network for digits whose blocks have names: Pinion's taps are all that it
// knows of attribution.
//
// Thread safety: as torch::nn::Module.

#ifndef PINION_EXAMPLES_DIGIT_NET_H_
#define PINION_EXAMPLES_DIGIT_NET_H_

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>

namespace pinion {

inline constexpr int64_t kDigitNetSide = 64;  // pixels of the pictures that it takes
inline constexpr int64_t kDigitClasses = 10;
inline constexpr char kLastDigitBlock[] = "block3";

// Four blocks of a convolution, a batch norm, a relu and, in front of all but the first, a pool
// that halves height and width; then the mean over each channel and a linear layer. For attribution
// block I is the layer "blockI".
class DigitNetImpl : public torch::nn::Cloneable<DigitNetImpl> {
 public:
  DigitNetImpl() { reset(); }
  // Draws the initial weights from torch's CPU generator.
  void reset() override;

  // pictures: [batch, 1, 64, 64], from 0 to 1 -> scores [batch, 10].
  torch::Tensor forward(const torch::Tensor& pictures) { return Scores(LastBlock(pictures)); }

  // forward's two halves, for those who want what is between them without taps.
  torch::Tensor LastBlock(const torch::Tensor& pictures);  // [batch, 64, 8, 8]
  torch::Tensor Scores(const torch::Tensor& last_block);

 private:
  torch::nn::ModuleList blocks_;
  torch::nn::Linear head_ = nullptr;
};
TORCH_MODULE(DigitNet);

}  // namespace pinion

#endif  // PINION_EXAMPLES_DIGIT_NET_H_
