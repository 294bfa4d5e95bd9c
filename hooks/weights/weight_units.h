// Splits a module's weights into units, which are fetched and evicted as a whole: its layers.
//
//   for (const WeightUnit& unit : WeightUnitsOf(*model)) ...
//
// Each child of a torch::nn::Sequential or ModuleList is a layer. So is each parameter of a
// ParameterList, which plain functions over tensors use. Of other modules, each one with parameters
// of its own is a layer.
//
// The trained and the frozen weights of a layer are two units, so that a step that trains an
// adapter does not evict the frozen base. A tensor of several modules belongs to the first one.

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
  std::string name;  // "blocks.0"; "" for the module itself
  bool requires_grad = false;
  std::vector<NamedWeight> weights;  // at least one
};

// Units have parameters, and buffers of 1 MiB or more as frozen weights. Exception: running
// statistics.
std::vector<WeightUnit> WeightUnitsOf(const torch::nn::Module& module);

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_WEIGHT_UNITS_H_
