#include "pinion/tests/hooks/support/test_net.h"

#include <ATen/Context.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/add.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/core/TensorOptions.h>

#include <cstring>
#include <optional>

#include "gtest/gtest.h"
#include "pinion/tests/hooks/support/emu_fixture.h"

namespace pinion::testing {
namespace {

constexpr uint64_t kSeed = 20261121;

// The float32 tolerance of torch.testing.assert_close.
constexpr double kRelativeOfGpu = 1.3e-6;
constexpr double kAbsoluteOfGpu = 1e-5;

constexpr size_t kParametersPerLayer = 10;

}  // namespace

TestNet::TestNet(c10::Device device, c10::ScalarType dtype, const NetShape& shape) : shape_(shape) {
  at::manual_seed(shape_.seed);
  const auto parameter = [&](const at::Tensor& value) {
    parameters_.push_back(value.to(device, dtype).detach().requires_grad_(true));
  };
  const auto linear = [&](int64_t in, int64_t out) {
    parameter(at::randn({out, in}) * 0.2);
    parameter(at::randn({out}) * 0.2);
  };
  const auto norm = [&](int64_t size) { parameter(at::ones({size}) + at::randn({size}) * 0.1); };
  for (int64_t layer = 0; layer < shape_.layers; ++layer) {
    norm(shape_.channels);
    linear(shape_.channels, 3 * shape_.channels);
    linear(shape_.channels, shape_.channels);
    norm(shape_.channels);
    linear(shape_.channels, 4 * shape_.channels);
    linear(4 * shape_.channels, shape_.channels);
  }
  linear(shape_.channels, shape_.classes);
  input_ = at::randn({shape_.batch, shape_.tokens, shape_.channels}).to(device, dtype);
  targets_ = at::randint(shape_.classes, {shape_.batch * shape_.tokens}, at::kLong).to(device);
}

at::Tensor TestNet::Block(const at::Tensor& x, size_t first_parameter) const {
  const at::Tensor* p = &parameters_[first_parameter];
  const int64_t head_channels = shape_.channels / shape_.heads;
  const auto heads = [&](const at::Tensor& t) {
    return t.view({shape_.batch, shape_.tokens, shape_.heads, head_channels}).transpose(1, 2);
  };
  const at::Tensor normed = at::layer_norm(x, {shape_.channels}, p[0], std::nullopt);
  const std::vector<at::Tensor> qkv = at::linear(normed, p[1], p[2]).chunk(3, -1);
  const at::Tensor attended =
      at::scaled_dot_product_attention(heads(qkv[0]), heads(qkv[1]), heads(qkv[2]), std::nullopt,
                                       /*dropout_p=*/0.0, /*is_causal=*/true)
          .transpose(1, 2)
          .reshape({shape_.batch, shape_.tokens, shape_.channels});
  const at::Tensor mixed =
      at::add(x, at::dropout(at::linear(attended, p[3], p[4]), shape_.dropout, /*train=*/true));
  const at::Tensor again = at::layer_norm(mixed, {shape_.channels}, p[5], std::nullopt);
  const at::Tensor wide = at::gelu(at::linear(again, p[6], p[7]));
  return at::add(mixed, at::dropout(at::linear(wide, p[8], p[9]), shape_.dropout, /*train=*/true));
}

at::Tensor TestNet::Loss() const {
  at::Tensor x = input_;
  for (int64_t layer = 0; layer < shape_.layers; ++layer) {
    x = Block(x, layer * kParametersPerLayer);
  }
  const size_t head = shape_.layers * kParametersPerLayer;
  const at::Tensor logits = at::linear(x, parameters_[head], parameters_[head + 1]);
  return at::cross_entropy_loss(logits.view({-1, shape_.classes}), targets_);
}

void SeedGenerators() { at::manual_seed(kSeed); }

Gradients TakeGradients(const TestNet& net, const at::Tensor& loss) {
  Gradients gradients;
  gradients.loss = loss.detach().cpu();
  for (const at::Tensor& parameter : net.parameters()) {
    at::Tensor& grad = parameter.mutable_grad();
    gradients.parameters.push_back(grad.defined() ? grad.cpu() : at::Tensor());
    grad.reset();
  }
  return gradients;
}

Gradients TrainStep(const TestNet& net, const std::shared_ptr<OffloadSession>& session) {
  SeedGenerators();
  at::Tensor loss;
  {
    std::optional<OffloadScope> scope;
    if (session != nullptr) scope.emplace(session);
    loss = net.Loss();
  }
  loss.backward();
  return TakeGradients(net, loss);
}

bool SameBytes(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  if (a.dtype() != b.dtype() || a.sizes() != b.sizes()) return false;
  const at::Tensor left = a.cpu().contiguous();
  const at::Tensor right = b.cpu().contiguous();
  return std::memcmp(left.const_data_ptr(), right.const_data_ptr(), left.nbytes()) == 0;
}

bool AsOnCpu(const at::Tensor& computed, const at::Tensor& on_cpu) {
  if (!TestsRunOnGpu() || !computed.defined()) return SameBytes(computed, on_cpu);
  return computed.sizes() == on_cpu.sizes() && computed.dtype() == on_cpu.dtype() &&
         at::allclose(computed.cpu(), on_cpu, kRelativeOfGpu, kAbsoluteOfGpu);
}

bool SameGradients(const Gradients& a, const Gradients& b) {
  if (a.parameters.size() != b.parameters.size() || !SameBytes(a.loss, b.loss)) return false;
  for (size_t i = 0; i < a.parameters.size(); ++i) {
    if (!SameBytes(a.parameters[i], b.parameters[i])) return false;
  }
  return true;
}

void ExpectSameGradients(const Gradients& expected, const Gradients& actual) {
  EXPECT_TRUE(SameBytes(expected.loss, actual.loss)) << "the loss differs";
  ASSERT_EQ(expected.parameters.size(), actual.parameters.size());
  for (size_t i = 0; i < expected.parameters.size(); ++i) {
    EXPECT_TRUE(SameBytes(expected.parameters[i], actual.parameters[i]))
        << "the gradient of parameter " << i << " differs";
  }
}

}  // namespace pinion::testing
