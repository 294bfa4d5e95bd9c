// A small convolutional network for digits with named blocks. Taps are its only link to
// attribution.
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

inline constexpr int64_t kDigitNetSide = 64;  // pixels of its input pictures
inline constexpr int64_t kDigitClasses = 10;
inline constexpr char kLastDigitBlock[] = "block3";

// Four blocks of a convolution, a batch norm and a relu; all but the first begin with a pool that
// halves height and width. Then the mean over each channel and a linear layer. For attribution
// block I is the layer "blockI".
class DigitNetImpl : public torch::nn::Cloneable<DigitNetImpl> {
 public:
  DigitNetImpl() { reset(); }
  // Draws the initial weights from torch's CPU generator.
  void reset() override;

  // Maps pictures [batch, 1, 64, 64], from 0 to 1, to scores [batch, 10].
  torch::Tensor forward(const torch::Tensor& pictures) { return Scores(LastBlock(pictures)); }

  // forward's two halves, for access to the values between them without taps.
  torch::Tensor LastBlock(const torch::Tensor& pictures);  // [batch, 64, 8, 8]
  torch::Tensor Scores(const torch::Tensor& last_block);

 private:
  torch::nn::ModuleList blocks_;
  torch::nn::Linear head_ = nullptr;
};
TORCH_MODULE(DigitNet);

}  // namespace pinion

#endif  // PINION_EXAMPLES_DIGIT_NET_H_
