#include "pinion/examples/digit_net.h"

#include <ATen/ops/avg_pool2d.h>
#include <ATen/ops/relu.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/options/conv.h>

#include <cstddef>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "pinion/hooks/attribution/tap.h"

namespace pinion {
namespace {

constexpr int64_t kWidths[] = {8, 16, 32, 64};  // channels of each block

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
  head_ = register_module("head", torch::nn::Linear(channels, kDigitClasses));
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

}  // namespace pinion
