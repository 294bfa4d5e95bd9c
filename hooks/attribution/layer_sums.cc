#include "pinion/hooks/attribution/layer_sums.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/zeros.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>

#include "pinion/device/host_arithmetic.h"

namespace pinion {
namespace {

// A few float32 blocks of this size fit into a core's cache.
constexpr int64_t kBlockElements = 64 * 1024;

}  // namespace

at::Tensor StepOf(const at::Tensor& tensor, int64_t step, const PassRows& rows) {
  TORCH_CHECK(tensor.dim() > 0 && tensor.size(0) % rows.size() == 0, "a layer of ", tensor.sizes(),
              " in a pass of ", rows.size(),
              " rows: its first dimension counts the rows of each "
              "step, so tap a value of which it does");
  const int64_t per_step = tensor.size(0) / rows.steps;
  return tensor.narrow(0, step * per_step, per_step);
}

at::Tensor SumOverSteps(const at::Tensor& tensor, const PassRows& rows,
                        absl::Span<const double> weights) {
  const at::ScalarType dtype = at::promote_types(tensor.scalar_type(), at::kFloat);
  at::Tensor sum = StepOf(tensor, 0, rows).to(dtype) * weights.front();
  for (int64_t step = 1; step < rows.steps; ++step) {
    sum.add_(StepOf(tensor, step, rows), weights[static_cast<size_t>(step)]);
  }
  return sum;
}

at::Tensor SumTermsOverSteps(
    const std::vector<at::Tensor>& tensors, const PassRows& rows,
    const std::function<void(at::Tensor& sum, const std::vector<at::Tensor>& blocks)>& add) {
  const at::Tensor first_step = StepOf(tensors.front(), 0, rows);
  const at::ScalarType dtype = at::promote_types(first_step.scalar_type(), at::kFloat);
  const at::Tensor result = at::zeros(first_step.sizes(), first_step.options().dtype(dtype));
  uint64_t memory_bytes = result.nbytes();
  std::vector<at::Tensor> by_step;
  for (const at::Tensor& tensor : tensors) {
    by_step.push_back(tensor.contiguous().view({rows.steps, -1}));
    const bool is_copied = !tensor.is_contiguous();
    memory_bytes += (is_copied ? 3 : 1) * tensor.nbytes();
  }
  at::Tensor flat = result.view({-1});
  const int64_t most = flat.is_cpu() ? kBlockElements : std::max<int64_t>(flat.numel(), 1);
  for (int64_t begin = 0; begin < flat.numel(); begin += most) {
    const int64_t count = std::min(most, flat.numel() - begin);
    std::vector<at::Tensor> blocks;
    for (const at::Tensor& tensor : by_step) blocks.push_back(tensor.narrow(1, begin, count));
    at::Tensor sum = flat.narrow(0, begin, count);
    add(sum, blocks);
  }
  if (result.is_cpu()) CountHostArithmetic(memory_bytes);
  return result;
}

void LayerSums::Add(LayerPart part, const PassRows& rows, at::Tensor tensor) {
  Sum& sum = sums_[part.layer][part.tensor];
  if (sum.first_example != rows.first_example) {
    sum.first_example = rows.first_example;
    sum.groups.push_back(std::move(tensor));
    return;
  }
  TORCH_CHECK(sum.groups.back().sizes() == tensor.sizes(), "layer \"", names_[part.layer],
              "\" has ", tensor.sizes(), " in one pass and ", sum.groups.back().sizes(),
              " in another one: its first dimension alone may depend on the rows");
  sum.groups.back().add_(tensor);
  if (tensor.is_cpu()) CountHostArithmetic(3 * tensor.nbytes());
}

void LayerSums::EndPass(const std::vector<LayerResult>& layers) {
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    layers_[layer].ran = layers_[layer].ran || layers[layer].ran;
    layers_[layer].connected = layers_[layer].connected || layers[layer].connected();
  }
}

std::vector<LayerAttribution> LayerSums::Take() {
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    const auto first = std::find(names_.begin(), names_.end(), names_[layer]) - names_.begin();
    for (const auto& [tensor, sum] : sums_[static_cast<size_t>(first)]) {
      layers_[layer].tensors.push_back(session_.Concatenate(sum.groups));
    }
  }
  return std::move(layers_);
}

}  // namespace pinion
