// From a module's weights to their masters in pinned host memory. Nothing of the module changes:
// until all of it has worked, an attempt can be given up.

#ifndef PINION_HOOKS_WEIGHTS_WEIGHT_MASTERS_H_
#define PINION_HOOKS_WEIGHTS_WEIGHT_MASTERS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/hooks/weights/device_weights.h"
#include "pinion/hooks/weights/master_watch.h"
#include "pinion/hooks/weights/weight_units.h"

namespace pinion {

struct WeightMaster {
  WeightUnit unit;
  UnitParcel parcel;  // away, with all bytes
  // By piece: as large as the weights' own storage, on the device, without memory.
  std::vector<c10::Storage> visiting;
  std::vector<size_t> piece_of;  // by weight of the unit
  std::vector<at::Tensor> host;  // by weight: over the parcel, with the gradients that there are
};

// InvalidArgument or FailedPrecondition names the weight that cannot visit, and why.
absl::Status CheckWeights(const std::vector<WeightUnit>& units, c10::Device device);

// ResourceExhausted where host memory has no room. Throws what copying from a device may.
absl::StatusOr<std::vector<WeightMaster>> FillMasters(DeviceTier& tier,
                                                      const std::vector<WeightUnit>& units,
                                                      c10::Device device);

// Tensors of the module that do not visit (small buffers, parameters without elements), with their
// copies on the device, where they are elsewhere. Throws where the device has no room.
std::vector<std::pair<at::Tensor, at::Tensor>> CopiesOfTheRest(const torch::nn::Module& module,
                                                               const std::vector<WeightUnit>& units,
                                                               c10::Device device);

// As WeightOptions has them.
struct AskedRoom {
  uint64_t window_bytes = 0;
  uint64_t target_bytes = 0;
};

// What units may have on the device. InvalidArgument where the largest one has no room in it, or
// both a window and a target are asked for.
absl::StatusOr<WeightRoom> RoomFor(const std::vector<WeightMaster>& masters,
                                   const AskedRoom& asked);

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_WEIGHT_MASTERS_H_
