// Gradients on their way from a device to host memory.
//
//   leaving.Put({.weight = 3, .unit = 1, .tensor = gradient}, /*in_unit=*/4);
//   ...
//   leaving.Settle();   // deliver(3, epoch, tensor on the host) was called
//
// The gradients of a unit leave together, with one copy, once all of them are there, or another
// unit's come, or one of another stream's. Where host memory has no room for that they are copied
// by LibTorch, which blocks. So the device holds those of one unit that fills, and of as many as
// may be on their way. They are delivered in the order in which they were put.
//
// Thread safety: autograd has one thread for a device, which puts; all else is for when no backward
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
  uint32_t epoch = 0;  // the owner's, for what it has forgotten meanwhile
  at::Tensor tensor;   // dense, on the device; nobody changes it any more
};

class LeavingGradients {
 public:
  using Deliver = std::function<void(size_t weight, uint32_t epoch, const at::Tensor& on_host)>;

  // Of `most_leaving` units, at least one, gradients may be on their way at once: Put waits for the
  // oldest before the next ones leave.
  LeavingGradients(std::shared_ptr<DeviceTier> tier, size_t most_leaving, Deliver deliver);

  // Made by the current stream of its device. `in_unit`: how many gradients the unit will have.
  void Put(LeavingGradient gradient, size_t in_unit);
  // Blocks until all that was put is delivered.
  void Settle();

  uint64_t left_bytes() const;

 private:
  struct Part {
    LeavingGradient gradient;
    c10::Stream stream;  // which made it
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
  // The oldest that is on its way, if there is one of the unit, or of any.
  bool SettleOldest(const uint32_t* unit);

  const std::shared_ptr<DeviceTier> tier_;
  const size_t most_leaving_;
  const Deliver deliver_;

  mutable Mutex mu_;
  std::vector<Part> collected_ ABSL_GUARDED_BY(mu_);  // of one unit
  std::deque<Arrival> on_the_way_ ABSL_GUARDED_BY(mu_);
  std::deque<std::shared_ptr<Parcel>> held_ ABSL_GUARDED_BY(mu_);  // whose copies may be under way
  uint64_t left_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_LEAVING_GRADIENTS_H_
