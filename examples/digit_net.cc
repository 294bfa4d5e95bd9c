#include "pinion/examples/digit_net.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randperm.h>
#include <ATen/ops/relu.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/options/conv.h>
#include <torch/optim/adam.h>
#include <torch/utils.h>

#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/examples/checkpoint.h"
#include "pinion/hooks/attribution/tap.h"
#include "pinion/programs/accelerator.h"
#include "pinion/programs/run_options.h"

namespace pinion {
namespace {

constexpr int64_t kWidths[] = {8, 16, 32, 64};  // channels of each block
constexpr int64_t kClasses = 10;

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

void DigitNetImpl::reset() {
  blocks_ = register_module("blocks", torch::nn::ModuleList());
  int64_t channels = 1;
  for (const int64_t width : kWidths) {
    blocks_->push_back(torch::nn::Sequential(
        torch::nn::Conv2d(torch::nn::Conv2dOptions(channels, width, 3).padding(1).bias(false)),
        torch::nn::BatchNorm2d(width)));
    channels = width;
  }
  head_ = register_module("head", torch::nn::Linear(channels, kClasses));
}

torch::Tensor DigitNetImpl::LastBlock(const torch::Tensor& pictures) {
  torch::Tensor x = pictures;
  for (size_t i = 0; i < blocks_->size(); ++i) {
    if (i > 0) x = at::avg_pool2d(x, 2);
    x = at::relu(blocks_[i]->as<torch::nn::Sequential>()->forward(x));
    x = Tap(absl::StrCat("block", i), std::move(x));
  }
  return x;
}

torch::Tensor DigitNetImpl::Scores(const torch::Tensor& last_block) {
  return head_->forward(last_block.mean({2, 3}));
}

absl::StatusOr<DigitNet> TrainDigitNet(const LabelledPictures& digits,
                                       const DigitTrainingOptions& options) {
  RunOptions run;
  run.device = options.device;
  PINION_ASSIGN_OR_RETURN(const Accelerator accelerator, Accelerator::Open(run));
  torch::manual_seed(options.seed);
  DigitNet net;
  Train(net, digits, accelerator.device(), options.epochs);
  return net;
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
