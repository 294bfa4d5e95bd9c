// Copies gradients from a device to host memory, unit by unit.
//
//   leaving.Put({.weight = 3, .unit = 1, .tensor = gradient}, /*in_unit=*/4);
//   ...
//   leaving.Settle();   // deliver(3, epoch, tensor on the host) was called
//
// The gradients of a unit are copied together, when they are complete or a gradient of another unit
// or stream follows. If there is no host memory for them, LibTorch copies them, which blocks. The
// device therefore holds gradients of one unit that fills and of `most_leaving` units under copy.
// Gradients are delivered in the order of Put.
//
// Thread safety: autograd's thread of the device calls Put. Call other functions while no backward
// runs.

#ifndef PINION_HOOKS_WEIGHTS_LEAVING_GRADIENTS_H_
#define PINION_HOOKS_WEIGHTS_LEAVING_GRADIENTS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/tier/parcel.h"

namespace pinion {

struct LeavingGradient {
  size_t weight = 0;
  uint32_t unit = 0;   // of the weight
  uint32_t epoch = 0;  // the owner's, to recognise gradients that it has discarded
  at::Tensor tensor;   // dense, on the device, and not changed afterwards
};

class LeavingGradients {
 public:
  using Deliver = std::function<void(size_t weight, uint32_t epoch, const at::Tensor& on_host)>;

  // `most_leaving`: the number of units under copy at once, at least one. Put waits for the oldest
  // before the next unit is copied.
  LeavingGradients(std::shared_ptr<DeviceTier> tier, size_t most_leaving, Deliver deliver);

  // The current stream of the device has made the gradient. `in_unit`: the unit's gradients in all.
  void Put(LeavingGradient gradient, size_t in_unit);
  // Blocks until all gradients are delivered.
  void Settle();

  uint64_t left_bytes() const;

 private:
  struct Part {
    LeavingGradient gradient;
    c10::Stream stream;  // that has made the gradient
    uint64_t offset_bytes = 0;
  };
  struct ArrivedPart {
    size_t weight = 0;
    uint32_t epoch = 0;
    uint64_t offset_bytes = 0;
    c10::ScalarType type = c10::ScalarType::Float;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
  };
  struct Arrival {
    std::shared_ptr<Parcel> parcel;
    std::vector<ArrivedPart> parts;
    uint32_t unit = 0;
  };

  void PutOut(std::vector<Part> parts);
  // Delivers the oldest unit under copy, if one is of `unit` (null: any). Returns whether it did.
  bool SettleOldest(const uint32_t* unit);

  const std::shared_ptr<DeviceTier> tier_;
  const size_t most_leaving_;
  const Deliver deliver_;

  mutable Mutex mu_;
  std::vector<Part> collected_ ABSL_GUARDED_BY(mu_);     // of one unit
  std::deque<Arrival> on_the_way_ ABSL_GUARDED_BY(mu_);  // all but the last most_leaving_: evicted
  uint64_t left_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_LEAVING_GRADIENTS_H_
