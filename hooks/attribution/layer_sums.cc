#include "pinion/hooks/attribution/layer_sums.h"

#include <ATen/TensorOperators.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace pinion {

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

uint64_t LayerSums::Add(LayerPart part, const PassRows& rows, at::Tensor tensor) {
  Sum& sum = sums_[part.layer][part.tensor];
  if (sum.first_example != rows.first_example) {
    sum.first_example = rows.first_example;
    sum.groups.push_back(std::move(tensor));
    return 0;
  }
  TORCH_CHECK(sum.groups.back().sizes() == tensor.sizes(), "layer \"", names_[part.layer],
              "\" has ", tensor.sizes(), " in one pass and ", sum.groups.back().sizes(),
              " in another one: its first dimension alone may depend on the rows");
  sum.groups.back().add_(tensor);
  return 3 * tensor.nbytes();
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
