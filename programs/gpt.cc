#include "pinion/programs/gpt.h"

#include <torch/nn/functional/activation.h>
#include <torch/nn/functional/dropout.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/options/normalization.h>
#include <torch/types.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "pinion/hooks/attribution/tap.h"
#include "pinion/programs/gpt_config.h"
#include "pinion/programs/run_part.h"

namespace pinion {
namespace {

namespace F = torch::nn::functional;

constexpr double kInitialDeviation = 0.02;

torch::nn::LayerNorm Norm(int64_t width) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}));
}

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const GptConfig& config)
      : config_(config),
        attention_norm_(register_module("attention_norm", Norm(config.width))),
        qkv_(register_module("qkv", torch::nn::Linear(config.width, 3 * config.width))),
        projection_(register_module("projection", torch::nn::Linear(config.width, config.width))),
        mlp_norm_(register_module("mlp_norm", Norm(config.width))),
        widen_(register_module("widen", torch::nn::Linear(config.width, 4 * config.width))),
        narrow_(register_module("narrow", torch::nn::Linear(4 * config.width, config.width))) {}

  torch::Tensor forward(const torch::Tensor& x) {
    return Part(&BlockImpl::Mlp, Part(&BlockImpl::Attention, x));
  }

  // Returns layers that write to the residual stream: their sum starts at the embeddings' scale.
  std::vector<torch::nn::Linear> residual_writers() { return {projection_, narrow_}; }

 private:
  // A block's parts, and their inner parts.
  torch::Tensor Attention(const torch::Tensor& x) {
    return x + Dropout(Part(&BlockImpl::Attend, qkv_(attention_norm_(x))));
  }
  torch::Tensor Mlp(const torch::Tensor& x) {
    return x + Dropout(Part(&BlockImpl::Narrow, widen_(mlp_norm_(x))));
  }
  torch::Tensor Attend(const torch::Tensor& qkv) {
    const int64_t batch = qkv.size(0), sequence = qkv.size(1);
    const std::vector<torch::Tensor> heads =
        qkv.view({batch, sequence, 3, config_.heads, config_.width / config_.heads})
            .permute({2, 0, 3, 1, 4})
            .unbind(0);
    const torch::Tensor attended =
        torch::scaled_dot_product_attention(heads[0], heads[1], heads[2], /*attn_mask=*/{},
                                            /*dropout_p=*/0.0, /*is_causal=*/true);
    return projection_(attended.transpose(1, 2).reshape({batch, sequence, config_.width}));
  }
  torch::Tensor Narrow(const torch::Tensor& wide) { return narrow_(F::gelu(wide)); }

  torch::Tensor Part(torch::Tensor (BlockImpl::*part)(const torch::Tensor&),
                     const torch::Tensor& x) {
    const auto run = [self = shared_from_this(), this, part](const torch::Tensor& in) {
      return (this->*part)(in);
    };
    return RunPart(config_.checkpoint_blocks, run, x);
  }

  torch::Tensor Dropout(const torch::Tensor& x) const {
    if (config_.dropout == 0 || !is_training()) return x;
    return F::dropout(x, F::DropoutFuncOptions().p(config_.dropout));
  }

  GptConfig config_;
  torch::nn::LayerNorm attention_norm_;
  torch::nn::Linear qkv_;
  torch::nn::Linear projection_;
  torch::nn::LayerNorm mlp_norm_;
  torch::nn::Linear widen_;
  torch::nn::Linear narrow_;
};
TORCH_MODULE(Block);

}  // namespace

GptImpl::GptImpl(const GptConfig& config)
    : config_(config),
      token_embedding_(register_module("token_embedding",
                                       torch::nn::Embedding(config.vocabulary, config.width))),
      position_embedding_(register_module("position_embedding",
                                          torch::nn::Embedding(config.sequence, config.width))),
      blocks_(register_module("blocks", torch::nn::ModuleList())),
      final_norm_(register_module("final_norm", Norm(config.width))),
      head_(register_module(
          "head", torch::nn::Linear(
                      torch::nn::LinearOptions(config.width, config.vocabulary).bias(false)))) {
  const torch::NoGradGuard no_grad;
  std::vector<torch::nn::Linear> residual_writers;
  for (int64_t layer = 0; layer < config.layers; ++layer) {
    Block block(config);
    for (torch::nn::Linear& writer : block->residual_writers()) residual_writers.push_back(writer);
    blocks_->push_back(block);
  }
  for (const auto& parameter : named_parameters()) {
    const bool is_norm = parameter.key().find("norm") != std::string::npos;
    if (is_norm) continue;
    if (parameter.value().dim() > 1) {
      torch::nn::init::normal_(parameter.value(), 0, kInitialDeviation);
    } else {
      torch::nn::init::zeros_(parameter.value());
    }
  }
  for (torch::nn::Linear& writer : residual_writers) {
    writer->weight.mul_(1 / std::sqrt(2.0 * config.layers));
  }
}

torch::Tensor GptImpl::forward(const torch::Tensor& tokens) {
  const torch::Tensor positions = torch::arange(
      tokens.size(1), torch::TensorOptions().dtype(torch::kInt64).device(tokens.device()));
  torch::Tensor x = token_embedding_(tokens) + position_embedding_(positions);
  for (size_t i = 0; i < blocks_->size(); ++i) {
    const auto block = [module = blocks_[i]](const torch::Tensor& in) {
      return module->as<Block>()->forward(in);
    };
    x = RunPart(config_.checkpoint_blocks, block, x);
    x = Tap("blocks." + std::to_string(i), std::move(x));
  }
  return head_(final_norm_(x));
}

}  // namespace pinion
