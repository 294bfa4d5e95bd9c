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
#include "pinion/programs/run_part.h"

namespace pinion {
namespace {

constexpr int64_t kGroups = 8;

torch::nn::Sequential Convolution(int64_t in, int64_t out) {
  return torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1)),
                               torch::nn::GroupNorm(torch::nn::GroupNormOptions(kGroups, out)),
                               torch::nn::SiLU());
}

class LevelImpl : public torch::nn::Module {
 public:
  LevelImpl(int64_t in, int64_t out, bool checkpoints)
      : checkpoints_(checkpoints),
        first_(register_module("first", Convolution(in, out))),
        second_(register_module("second", Convolution(out, out))) {}

  // The first convolution's input is `make` of the inputs.
  template <typename Make, typename... Inputs>
  torch::Tensor forward(const Make& make, Inputs&&... inputs) {
    const auto first = [self = shared_from_this(), this, make](auto&... in) {
      return first_->forward(make(in...));
    };
    const auto second = [self = shared_from_this(), this](torch::Tensor& in) {
      return second_->forward(std::move(in));
    };
    return RunPart(checkpoints_, second,
                   RunPart(checkpoints_, first, std::forward<Inputs>(inputs)...));
  }

 private:
  const bool checkpoints_;
  torch::nn::Sequential first_;
  torch::nn::Sequential second_;
};
TORCH_MODULE(Level);

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
    down_->push_back(Level(in, out, config.checkpoint_levels));
  }
  for (; in > config.width; in /= 2) {
    enlarge_->push_back(
        torch::nn::ConvTranspose2d(torch::nn::ConvTranspose2dOptions(in, in / 2, 2).stride(2)));
    up_->push_back(Level(in, in / 2, config.checkpoint_levels));
  }
}

torch::Tensor UNetImpl::forward(const torch::Tensor& images) {
  std::vector<torch::Tensor> made;
  torch::Tensor x = images;
  for (size_t i = 0; i < down_->size(); ++i) {
    const auto level = [i, module = down_[i]](const torch::Tensor& above) {
      const auto shrink = [i](const torch::Tensor& in) {
        return i > 0 ? torch::max_pool2d(in, 2) : in;
      };
      return module->as<Level>()->forward(shrink, above);
    };
    x = RunPart(config_.checkpoint_levels, level, x);
    x = Tap("down." + std::to_string(i), std::move(x));
    made.push_back(x);
  }
  made.pop_back();
  for (size_t i = 0; i < up_->size(); ++i) {
    const auto level = [enlarge = enlarge_[i], module = up_[i]](const torch::Tensor& beside,
                                                                torch::Tensor& below) {
      const auto join = [enlarge](const torch::Tensor& to, torch::Tensor& from) {
        from = enlarge->as<torch::nn::ConvTranspose2d>()->forward(from);
        return torch::cat({to, from}, 1);
      };
      return module->as<Level>()->forward(join, beside, std::move(below));
    };
    x = RunPart(config_.checkpoint_levels, level, made.back(), std::move(x));
    made.pop_back();
    x = Tap("up." + std::to_string(i), std::move(x));
  }
  return last_->forward(x);
}

}  // namespace pinion
