// A small convolutional network for digits with named blocks, whose taps are its only link to
// attribution. It is trained, or read from a checkpoint.
//
// Thread safety: as torch::nn::Module; one thread trains a network.

#ifndef PINION_EXAMPLES_DIGIT_NET_H_
#define PINION_EXAMPLES_DIGIT_NET_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "pinion/examples/digit_pictures.h"

namespace pinion {

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

struct DigitTrainingOptions {
  int64_t epochs = 0;
  uint64_t seed = 1;  // of the initial weights, and of the pictures' order
  std::string device = "emu:0";
};

// Returns the network on the host in evaluation mode. c10::Error if an operator fails.
absl::StatusOr<DigitNet> TrainDigitNet(const LabelledPictures& digits,
                                       const DigitTrainingOptions& options);

// Returns the network's state by its names in a checkpoint. The tensors share memory with the
// network's.
std::map<std::string, at::Tensor> DigitWeights(const DigitNet& net);
// Errors: those of ReadCheckpoint; DataLoss if the checkpoint is another network's.
absl::StatusOr<DigitNet> ReadDigitNet(const std::string& path);

// Returns the share of `digits` that `net`, on the host, classifies correctly.
double DigitAccuracy(DigitNet& net, const LabelledPictures& digits);

}  // namespace pinion

#endif  // PINION_EXAMPLES_DIGIT_NET_H_
