#include "pinion/examples/digit_training.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randperm.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/optim/adam.h>
#include <torch/utils.h>

#include <cstdint>
#include <exception>
#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/examples/checkpoint.h"
#include "pinion/examples/digit_net.h"
#include "pinion/examples/digit_pictures.h"
#include "pinion/programs/accelerator.h"
#include "pinion/programs/run_options.h"

namespace pinion {
namespace {

constexpr int64_t kBatch = 16;               // pictures
constexpr double kFirstLearningRate = 1e-2;  // falls linearly to almost 0

void Train(DigitNet& net, const LabelledPictures& digits, c10::Device device, int64_t epochs) {
  net->to(device);
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(kFirstLearningRate));
  const int64_t count = digits.labels.numel();
  const int64_t steps = epochs * ((count + kBatch - 1) / kBatch);
  int64_t step = 0;
  for (int64_t epoch = 0; epoch < epochs; ++epoch) {
    for (const at::Tensor& batch : at::randperm(count, at::kLong).split(kBatch)) {
      const double left = 1 - static_cast<double>(step++) / static_cast<double>(steps);
      optimizer.param_groups().front().options().set_lr(kFirstLearningRate * left);
      const at::Tensor pictures = digits.pictures.index_select(0, batch).to(device);
      const at::Tensor labels = digits.labels.index_select(0, batch).to(device);
      const at::Tensor loss = at::cross_entropy_loss(net->forward(pictures), labels);
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
    }
  }
  optimizer.zero_grad();
  net->to(at::kCPU);
  net->eval();
}

}  // namespace

absl::StatusOr<DigitNet> TrainDigitNet(const LabelledPictures& digits,
                                       const DigitTrainingOptions& options) {
  RunOptions run;
  run.device = options.device;
  try {
    PINION_ASSIGN_OR_RETURN(const Accelerator accelerator, Accelerator::Open(run));
    torch::manual_seed(options.seed);
    DigitNet net;
    Train(net, digits, accelerator.device(), options.epochs);
    return net;
  } catch (const c10::Error& error) {
    return absl::InternalError(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  }
}

std::map<std::string, at::Tensor> DigitWeights(const DigitNet& net) {
  std::map<std::string, at::Tensor> weights;
  for (const auto& tensors : {net->named_parameters(), net->named_buffers()}) {
    for (const auto& tensor : tensors) {
      weights.emplace(absl::StrCat("model.", tensor.key()), tensor.value().detach());
    }
  }
  return weights;
}

absl::StatusOr<DigitNet> ReadDigitNet(const std::string& path) {
  PINION_ASSIGN_OR_RETURN(const Checkpoint checkpoint, ReadCheckpoint(path));
  DigitNet net;
  for (auto& [name, weight] : DigitWeights(net)) {
    const auto saved = checkpoint.tensors.find(name);
    if (saved == checkpoint.tensors.end() || saved->second.sizes() != weight.sizes()) {
      return absl::DataLossError(
          absl::StrCat(path, " has no tensor ", name, " of the right size: another program's?"));
    }
    weight.copy_(saved->second);
  }
  net->eval();
  return net;
}

double DigitAccuracy(DigitNet& net, const LabelledPictures& digits) {
  const at::NoGradGuard no_grad;
  const at::Tensor taken_for = net->forward(digits.pictures).argmax(1);
  return (taken_for == digits.labels).to(at::kDouble).mean().item<double>();
}

}  // namespace pinion
