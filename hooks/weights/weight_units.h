// What of a module visits together: its layers.
//
//   for (const WeightUnit& unit : WeightUnitsOf(*model)) ...
//
// Each child of a torch::nn::Sequential or ModuleList is a layer, and each parameter of a
// ParameterList, which is how plain functions over tensors have theirs; of all other modules each
// that has parameters of its own. Of a layer what requires a gradient and what does not are two
// units, so that an adapter's training fetches the frozen base anew for no step. A tensor that is
// in several modules belongs to the first one.

#ifndef PINION_HOOKS_WEIGHTS_WEIGHT_UNITS_H_
#define PINION_HOOKS_WEIGHTS_WEIGHT_UNITS_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace pinion {

struct NamedWeight {
  std::string name;  // "blocks.0.attention.weight"
  at::Tensor tensor;
};

struct WeightUnit {
  std::string name;  // "blocks.0"; of the module itself ""
  bool requires_grad = false;
  std::vector<NamedWeight> weights;  // at least one
};

// Parameters, and buffers of 1 MiB or more, which count as frozen. Exception: running statistics.
std::vector<WeightUnit> WeightUnitsOf(const torch::nn::Module& module);

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_WEIGHT_UNITS_H_
