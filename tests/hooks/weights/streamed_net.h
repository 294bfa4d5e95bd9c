// A model whose weights are streamed to a device, in tests: neither wrapped nor changed for that.

#ifndef PINION_TESTS_HOOKS_WEIGHTS_STREAMED_NET_H_
#define PINION_TESTS_HOOKS_WEIGHTS_STREAMED_NET_H_

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/tanh.h>
#include <c10/core/GradMode.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <cstdint>

namespace pinion::testing {

inline constexpr int64_t kWidth = 64;
inline constexpr uint64_t kLayerBytes = (kWidth * kWidth + kWidth) * sizeof(float);
static_assert(kWidth * sizeof(float) % 256 == 0);
// A bias is padded to 512 bytes.
inline constexpr uint64_t kUnitBytes = kWidth * kWidth * sizeof(float) + 512;

// Residual blocks, each a Linear and what follows it, and weights that are the same in all
// processes.
struct BlockImpl : torch::nn::Module {
  BlockImpl() : linear(register_module("linear", torch::nn::Linear(kWidth, kWidth))) {}
  at::Tensor forward(const at::Tensor& x) { return x + at::tanh(linear(x)); }
  torch::nn::Linear linear;
};
TORCH_MODULE(Block);

// Its forward is a plain loop.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(int layers) : blocks(register_module("blocks", torch::nn::ModuleList())) {
    for (int layer = 0; layer < layers; ++layer) blocks->push_back(Block());
    const at::NoGradGuard no_grad;
    int64_t seed = 0;
    for (at::Tensor& parameter : parameters()) {
      const at::Tensor i = at::arange(parameter.numel(), at::kFloat);
      parameter.copy_(at::sin(i * 0.37 + static_cast<double>(++seed)).view(parameter.sizes()) *
                      0.2);
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    return x;
  }
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Net);

inline at::Tensor Input(double seed = 0, int64_t rows = 8) {
  return at::sin(at::arange(rows * kWidth, at::kFloat) * 0.11 + seed).view({rows, kWidth});
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_WEIGHTS_STREAMED_NET_H_
