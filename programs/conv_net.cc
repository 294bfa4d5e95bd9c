#include "pinion/programs/conv_net.h"

#include <torch/nn/functional/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/options/conv.h>

#include <string>
#include <utility>

#include "pinion/hooks/attribution/tap.h"
#include "pinion/programs/run_part.h"

namespace pinion {
namespace {

// A convolution that keeps height and width, or divides both by `stride`, and its norm.
class ConvNormImpl : public torch::nn::Module {
 public:
  ConvNormImpl(int64_t in, int64_t out, int64_t kernel, int64_t stride, bool is_checkpoint)
      : is_checkpoint_(is_checkpoint),
        convolution_(register_module("convolution",
                                     torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, kernel)
                                                           .stride(stride)
                                                           .padding(kernel / 2)
                                                           .bias(false)))),
        norm_(register_module("norm", torch::nn::BatchNorm2d(out))) {}

  torch::Tensor forward(torch::Tensor x) {
    const auto run = [self = shared_from_this(), this](torch::Tensor& in) {
      in = convolution_->forward(in);
      return norm_->forward(in);
    };
    return RunPart(is_checkpoint_, run, std::move(x));
  }

 private:
  const bool is_checkpoint_;
  torch::nn::Conv2d convolution_;
  torch::nn::BatchNorm2d norm_;
};
TORCH_MODULE(ConvNorm);

class ConvBlockImpl : public torch::nn::Module {
 public:
  ConvBlockImpl(int64_t in, int64_t out, int64_t stride, bool checkpoints)
      : checkpoints_(checkpoints),
        first_(register_module("first", ConvNorm(in, out, 3, stride, checkpoints))),
        second_(register_module("second", ConvNorm(out, out, 3, 1, checkpoints))) {
    if (in != out || stride != 1) {
      beside_ = register_module("beside", ConvNorm(in, out, 1, stride, checkpoints));
    }
  }

  torch::Tensor forward(const torch::Tensor& x) {
    const auto first = [self = shared_from_this(), this](const torch::Tensor& in) {
      return torch::relu(first_->forward(in));
    };
    const auto second = [self = shared_from_this(), this](torch::Tensor& in,
                                                          const torch::Tensor& beside) {
      const torch::Tensor y = second_->forward(std::move(in));
      return torch::relu(y + (beside_.is_empty() ? beside : beside_->forward(beside)));
    };
    return RunPart(checkpoints_, second, RunPart(checkpoints_, first, x), x);
  }

 private:
  const bool checkpoints_;
  ConvNorm first_;
  ConvNorm second_;
  ConvNorm beside_ = nullptr;  // null if the input has the output's shape
};
TORCH_MODULE(ConvBlock);

}  // namespace

ConvNetImpl::ConvNetImpl(const ConvNetConfig& config)
    : config_(config), blocks_(register_module("blocks", torch::nn::ModuleList())), head_(nullptr) {
  blocks_->push_back(ConvNorm(3, config.width, 3, 1, /*is_checkpoint=*/false));
  int64_t width = config.width;
  for (int64_t stage = 0; stage < config.stages; ++stage) {
    for (int64_t block = 0; block < config.blocks_per_stage; ++block) {
      const bool narrows = stage > 0 && block == 0;
      const int64_t in = width;
      if (narrows) width *= 2;
      blocks_->push_back(ConvBlock(in, width, narrows ? 2 : 1, config.checkpoint_blocks));
    }
  }
  head_ = register_module("head", torch::nn::Linear(width, config.classes));
}

torch::Tensor ConvNetImpl::forward(const torch::Tensor& images) {
  torch::Tensor x = Tap("blocks.0", blocks_[0]->as<ConvNorm>()->forward(images));
  for (size_t i = 1; i < blocks_->size(); ++i) {
    const auto block = [module = blocks_[i]](const torch::Tensor& in) {
      return module->as<ConvBlock>()->forward(in);
    };
    x = RunPart(config_.checkpoint_blocks, block, x);
    x = Tap("blocks." + std::to_string(i), std::move(x));
  }
  return head_->forward(x.mean({2, 3}));
}

}  // namespace pinion
