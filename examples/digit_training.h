// Trains a DigitNet, or reads one from a checkpoint.
//
// Thread safety: one thread for a network.

#ifndef PINION_EXAMPLES_DIGIT_TRAINING_H_
#define PINION_EXAMPLES_DIGIT_TRAINING_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "pinion/examples/digit_net.h"
#include "pinion/examples/digit_pictures.h"

namespace pinion {

struct DigitTrainingOptions {
  int64_t epochs = 0;
  uint64_t seed = 1;  // of the initial weights, and of the pictures' order
  std::string device = "emu:0";
};

// Returns the network on the host in evaluation mode.
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

#endif  // PINION_EXAMPLES_DIGIT_TRAINING_H_
