// The gradients of streamed weights, on the host: what backward makes on the device is added to the
// host copy's grad(), and whatever a program does to either grad() holds for both.
//
//   gradients->Collect(index, parameter);   // backward has accumulated
//   ...
//   gradients->Follow();                    // the host copies' grad() are complete
//
// Where there is a gradient, the parameter's grad() shows it (shown_gradient.h), and so does the
// host copy's while some of it is on its way. A grad() that shows it no more was reset
// (zero_grad()) or replaced: then what is there counts instead, and what is on its way is dropped.
// The first gradient of a host copy is the pinned memory that it was copied to; later ones are
// added to it. Sums are made in the order of the backwards.
//
// A gradient with a graph of its own (create_graph) stays in the parameter's grad() until Follow.
//
// Thread safety: autograd has one thread for a device, which collects; all else is for when no
// backward runs.

#ifndef PINION_HOOKS_WEIGHTS_HOST_GRADIENTS_H_
#define PINION_HOOKS_WEIGHTS_HOST_GRADIENTS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "pinion/engine/tier/device_tier.h"
#include "pinion/hooks/weights/leaving_gradients.h"
#include "pinion/hooks/weights/master_watch.h"
#include "pinion/hooks/weights/shown_gradient.h"

namespace pinion {

struct FollowedWeight {
  std::string name;
  c10::weak_intrusive_ptr<c10::TensorImpl> parameter;  // on the device
  at::Tensor master;                                   // on the host
  std::shared_ptr<MasterWatch> watch;
  uint32_t unit = 0;
};

struct GradientOptions {
  size_t most_leaving = 1;  // units, as LeavingGradients has it
  // Gradients are added on the device, and leave with Follow.
  bool stay = false;
};

class HostGradients : public std::enable_shared_from_this<HostGradients> {
 public:
  // Weights are known by their index in `weights`.
  HostGradients(std::shared_ptr<DeviceTier> tier, std::vector<FollowedWeight> weights,
                const GradientOptions& options);
  ~HostGradients();

  // Sets hooks, and shows the gradients that host copies have.
  void Begin();

  // For the hook: takes what grad() of the parameter has. Throws, and names the weight, where there
  // can be no gradient of it.
  void Collect(size_t index, const at::Tensor& parameter);

  // Blocks until host copies have all gradients, and follow their parameters in grad(),
  // requires_grad() and grad_dtype(). Throws, and names the weight, where they cannot.
  void Follow();
  // In norm 2, over all host copies that have a gradient, as torch::nn::utils::clip_grad_norm_ does
  // it (NaN or infinite included); returns the norm before.
  double ClipNorm(double max_norm);
  void Zero();

  uint64_t left_bytes() const { return leaving_.left_bytes(); }

  // --- for ShownGradient ---

  const std::string& NameOf(size_t index) const { return weights_[index].name; }
  bool Shows(size_t index, const ShownGradient& shown) const;
  // Backward, and no hook of the program's, is about to add to the parameter's grad().
  bool IsAccumulating(size_t index) const;
  // Complete; undefined if the host has none.
  at::Tensor Value(size_t index);
  // On the device; nobody changes it any more.
  void Add(size_t index, const at::Tensor& gradient);
  void Zero(size_t index);

 private:
  struct Weight : FollowedWeight {
    bool requires_grad = false;  // as both had it last
    // What grad() is, of the parameter and of the host copy; null where that shows nothing. While
    // the host copy's does, `sum` has what has arrived.
    std::shared_ptr<ShownGradient> in_parameter = nullptr;
    std::shared_ptr<ShownGradient> on_host = nullptr;
    at::Tensor sum = {};
    at::Tensor staying = {};  // on the device, to be added to `sum`
    bool has_graph = false;   // the parameter's grad() has all, and a graph
    uint32_t epoch = 0;       // what left in an earlier one was forgotten
  };

  at::Tensor ParameterOf(const Weight& weight) const;
  at::Tensor Show(size_t index, std::shared_ptr<ShownGradient>& shown, c10::ScalarType type,
                  c10::Device device);
  void ShowInParameter(size_t index, const at::Tensor& parameter);
  bool HostShows(const Weight& weight) const;
  void SetHook(size_t index, const at::Tensor& parameter);
  void TakeGrad(size_t index, const at::Tensor& parameter, bool with_graph);
  void FollowRequiresGrad(Weight& weight, const at::Tensor& parameter);
  // The host copy's grad() shows what leaves from now on.
  void BeginLeaving(size_t index, const at::Tensor& gradient);
  void Arrive();
  void OnArrived(size_t index, uint32_t epoch, const at::Tensor& arrived);
  // The host copy's grad() is a plain tensor again.
  void Publish(Weight& weight);
  void Forget(Weight& weight);

  const bool stay_;
  std::vector<Weight> weights_;
  std::vector<size_t> in_unit_;  // by unit: how many of its weights are trained
  LeavingGradients leaving_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_HOST_GRADIENTS_H_
