#include "pinion/programs/u_net.h"

#include <torch/nn/functional/pooling.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/options/conv.h>
#include <torch/nn/options/normalization.h>

#include <string>
#include <utility>
#include <vector>

#include "pinion/hooks/attribution/tap.h"
#include "pinion/hooks/checkpoint/checkpoint.h"

namespace pinion {
namespace {

constexpr int64_t kGroups = 8;

torch::nn::Sequential TwoConvolutions(int64_t in, int64_t out) {
  torch::nn::Sequential layers;
  for (const int64_t from : {in, out}) {
    layers->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(from, out, 3).padding(1)));
    layers->push_back(torch::nn::GroupNorm(torch::nn::GroupNormOptions(kGroups, out)));
    layers->push_back(torch::nn::SiLU());
  }
  return layers;
}

}  // namespace

UNetImpl::UNetImpl(const UNetConfig& config)
    : config_(config),
      down_(register_module("down", torch::nn::ModuleList())),
      enlarge_(register_module("enlarge", torch::nn::ModuleList())),
      up_(register_module("up", torch::nn::ModuleList())),
      last_(register_module(
          "last", torch::nn::Conv2d(torch::nn::Conv2dOptions(config.width, config.channels, 1)))) {
  int64_t in = config.channels;
  int64_t out = config.width;
  for (int64_t level = 0; level < config.levels; ++level, in = out, out *= 2) {
    down_->push_back(TwoConvolutions(in, out));
  }
  for (; in > config.width; in /= 2) {
    enlarge_->push_back(
        torch::nn::ConvTranspose2d(torch::nn::ConvTranspose2dOptions(in, in / 2, 2).stride(2)));
    up_->push_back(TwoConvolutions(in, in / 2));
  }
}

torch::Tensor UNetImpl::forward(const torch::Tensor& images) {
  std::vector<torch::Tensor> made;
  torch::Tensor x = images;
  for (size_t i = 0; i < down_->size(); ++i) {
    const auto level = [i, layers = down_[i]](const torch::Tensor& above) {
      return layers->as<torch::nn::Sequential>()->forward(i > 0 ? torch::max_pool2d(above, 2)
                                                                : above);
    };
    x = config_.checkpoint_levels ? checkpoint({.if_planned = true}, level, x) : level(x);
    x = Tap("down." + std::to_string(i), std::move(x));
    made.push_back(x);
  }
  made.pop_back();
  for (size_t i = 0; i < up_->size(); ++i) {
    const auto level = [enlarge = enlarge_[i], layers = up_[i]](const torch::Tensor& beside,
                                                                torch::Tensor& below) {
      below = enlarge->as<torch::nn::ConvTranspose2d>()->forward(below);
      return layers->as<torch::nn::Sequential>()->forward(torch::cat({beside, below}, 1));
    };
    x = config_.checkpoint_levels
            ? checkpoint({.if_planned = true}, level, made.back(), std::move(x))
            : level(made.back(), x);
    made.pop_back();
    x = Tap("up." + std::to_string(i), std::move(x));
  }
  return last_->forward(x);
}

}  // namespace pinion
