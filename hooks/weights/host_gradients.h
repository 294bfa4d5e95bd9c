// Gradients of weights that visit: as backward has accumulated one on the device, it leaves for the
// host, where it is added to the master's.
//
//   gradients->Collect(index);        // a backward has made the gradient of weight `index`
//   ...
//   gradients->Settle();              // masters' grad() hold all that has left
//
// The gradients of a unit leave together, with one copy, once all of them are there, or another
// unit's come, or one of another stream's. Where host memory has no room for that they are copied
// by LibTorch, which blocks. So the device holds those of one unit that fills, and of as many as
// may be on their way. The first gradient of a master is the pinned memory that it was copied to;
// later ones are added to it, which virtual time charges at the preset's host bandwidth. Sums are
// made in the order of the backwards.
//
// A gradient with a graph of its own (create_graph) stays on the device, in the parameter's grad(),
// and so do those that are added to it, until module->zero_grad().
//
// Thread safety: autograd has one thread for a device, which collects; all else is for when no
// backward runs.

#ifndef PINION_HOOKS_WEIGHTS_HOST_GRADIENTS_H_
#define PINION_HOOKS_WEIGHTS_HOST_GRADIENTS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/engine/tier/device_tier.h"
#include "pinion/engine/tier/parcel.h"

namespace pinion {

// The master of a weight that is trained.
struct TrainedWeight {
  at::Tensor master;  // on the host
  uint32_t unit = 0;
};

class HostGradients {
 public:
  // Weights are known by their index in `weights`. Of `most_leaving` units, at least one, gradients
  // may be on their way at once: backward waits for the oldest before the next ones leave.
  HostGradients(std::shared_ptr<DeviceTier> tier, std::vector<TrainedWeight> weights,
                size_t most_leaving);

  // grad() of the weight is there; it is empty afterwards. Called by autograd.
  void Collect(size_t index, const at::Tensor& weight);

  // Blocks until all that was collected is in the masters' gradients.
  void Settle();
  // In norm 2, over all masters that have a gradient; returns the norm before (NaN or infinite
  // included, as torch::nn::utils::clip_grad_norm_ does).
  double ClipNorm(double max_norm);
  void Zero();

  uint64_t left_bytes() const;

 private:
  struct Part {
    size_t weight = 0;
    at::Tensor gradient;  // on the device
    c10::Stream stream;   // which made it
    uint64_t offset_bytes = 0;
  };
  struct ArrivedPart {
    size_t weight = 0;
    uint64_t offset_bytes = 0;
    std::vector<int64_t> sizes;
    std::vector<int64_t> strides;
  };
  struct Arrival {
    std::shared_ptr<Parcel> parcel;
    std::vector<ArrivedPart> parts;
    uint32_t unit = 0;
  };

  void PutOut(std::vector<Part> parts);
  void AddToMasters(const Arrival& arrival);
  void AddToMaster(size_t weight, const at::Tensor& arrived);
  // The oldest that is on its way, if there is one of the unit, or of any.
  bool SettleOldest(const uint32_t* unit);

  struct Master {
    at::Tensor master;
    uint32_t unit = 0;
    size_t in_unit = 0;  // how many weights of the unit are trained
  };
  const std::shared_ptr<DeviceTier> tier_;
  const size_t most_leaving_;
  std::vector<Master> weights_;

  mutable Mutex mu_;
  std::vector<Part> collected_ ABSL_GUARDED_BY(mu_);  // of one unit
  std::deque<Arrival> on_the_way_ ABSL_GUARDED_BY(mu_);
  std::deque<std::shared_ptr<Parcel>> held_ ABSL_GUARDED_BY(mu_);  // whose copies may be under way
  uint64_t left_bytes_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_HOST_GRADIENTS_H_
