// Splits a module's weights into units, which are fetched and evicted as a whole, and copies them
// to pinned host memory. Does not change the module, so that WeightOffloader::Attach can fail
// without an effect.
//
//   PINION_ASSIGN_OR_RETURN(auto masters, FillMasters(tier, WeightUnitsOf(module), device));
//
// Units are layers. Each child of a torch::nn::Sequential or ModuleList is a layer. So is each
// parameter of a ParameterList, which plain functions over tensors use. Of other modules, each one
// with parameters of its own is a layer.
//
// The trained and the frozen weights of a layer are two units, so that a step that trains an
// adapter does not evict the frozen base. A tensor of several modules belongs to the first one.

#ifndef PINION_HOOKS_WEIGHTS_WEIGHT_MASTERS_H_
#define PINION_HOOKS_WEIGHTS_WEIGHT_MASTERS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/hooks/weights/device_units.h"

namespace pinion {

struct WeightOptions;

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

struct WeightMaster {
  WeightUnit unit;
  UnitParcel parcel;  // filled
  // By piece: a device storage without memory, as large as the weights' own.
  std::vector<c10::Storage> streamed;
  std::vector<size_t> piece_of;  // by weight of the unit
  std::vector<at::Tensor> host;  // by weight: the host copy, in the parcel, with the gradient
};

// Returns InvalidArgument or FailedPrecondition with the first weight that cannot be streamed.
absl::Status CheckWeights(const std::vector<WeightUnit>& units, c10::Device device);

// Returns ResourceExhausted if there is no host memory. Throws if a copy from a device fails.
absl::StatusOr<std::vector<WeightMaster>> FillMasters(DeviceTier& tier,
                                                      const std::vector<WeightUnit>& units,
                                                      c10::Device device);

// Returns the module's tensors that are neither streamed nor on the device, with copies there:
// small buffers and parameters without elements. Throws if the device has no memory.
std::vector<std::pair<at::Tensor, at::Tensor>> CopiesOfTheRest(const torch::nn::Module& module,
                                                               const std::vector<WeightUnit>& units,
                                                               c10::Device device);

// Returns InvalidArgument if the largest unit does not fit, or if a window and a target are given.
absl::StatusOr<WeightRoom> RoomFor(const std::vector<WeightMaster>& masters,
                                   const WeightOptions& options);

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_WEIGHT_MASTERS_H_
