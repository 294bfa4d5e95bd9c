#include "pinion/programs/conv_net.h"

#include <torch/nn/functional/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/options/conv.h>

#include <string>
#include <utility>

#include "pinion/hooks/attribution/tap.h"
#include "pinion/hooks/checkpoint/checkpoint.h"

namespace pinion {
namespace {

// A convolution that keeps height and width, or divides both by `stride`, and its norm.
torch::nn::Sequential ConvNorm(int64_t in, int64_t out, int64_t kernel, int64_t stride) {
  return torch::nn::Sequential(
      torch::nn::Conv2d(
          torch::nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false)),
      torch::nn::BatchNorm2d(out));
}

class ConvBlockImpl : public torch::nn::Module {
 public:
  ConvBlockImpl(int64_t in, int64_t out, int64_t stride)
      : first_(register_module("first", ConvNorm(in, out, 3, stride))),
        second_(register_module("second", ConvNorm(out, out, 3, 1))) {
    if (in != out || stride != 1) {
      beside_ = register_module("beside", ConvNorm(in, out, 1, stride));
    }
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor y = second_->forward(torch::relu(first_->forward(x)));
    return torch::relu(y + (beside_.is_empty() ? x : beside_->forward(x)));
  }

 private:
  torch::nn::Sequential first_;
  torch::nn::Sequential second_;
  torch::nn::Sequential beside_ = nullptr;  // none where the input has the output's shape
};
TORCH_MODULE(ConvBlock);

}  // namespace

ConvNetImpl::ConvNetImpl(const ConvNetConfig& config)
    : config_(config), blocks_(register_module("blocks", torch::nn::ModuleList())), head_(nullptr) {
  blocks_->push_back(ConvNorm(3, config.width, 3, 1));
  int64_t width = config.width;
  for (int64_t stage = 0; stage < config.stages; ++stage) {
    for (int64_t block = 0; block < config.blocks_per_stage; ++block) {
      const bool narrows = stage > 0 && block == 0;
      const int64_t in = width;
      if (narrows) width *= 2;
      blocks_->push_back(ConvBlock(in, width, narrows ? 2 : 1));
    }
  }
  head_ = register_module("head", torch::nn::Linear(width, config.classes));
}

torch::Tensor ConvNetImpl::forward(const torch::Tensor& images) {
  torch::Tensor x = Tap("blocks.0", blocks_[0]->as<torch::nn::Sequential>()->forward(images));
  for (size_t i = 1; i < blocks_->size(); ++i) {
    const auto block = [module = blocks_[i]](const torch::Tensor& in) {
      return module->as<ConvBlock>()->forward(in);
    };
    x = config_.checkpoint_blocks ? checkpoint({.if_planned = true}, block, x) : block(x);
    x = Tap("blocks." + std::to_string(i), std::move(x));
  }
  return head_->forward(x.mean({2, 3}));
}

}  // namespace pinion
