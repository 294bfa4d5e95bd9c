// Gradients of streamed weights on the host. Adds the gradients of each backward to the host copy's
// grad(), and makes changes of the parameter's or the host copy's grad() hold for both.
//
//   gradients->Collect(index, parameter);   // backward has accumulated
//   ...
//   gradients->Follow();                    // the host copies' grad() are complete
//
// A parameter with a gradient has a ShownGradient (shown_gradient.h) as its grad(). The host copy
// has one while a part of its gradient is under copy. If a program resets (zero_grad()) or replaces
// such a grad(), the new value counts, and parts under copy are discarded. The first gradient stays
// in the pinned memory of its copy. Later ones are added to it, in the order of the backwards.
//
// A gradient with a graph of its own (create_graph) stays in the parameter's grad() until Follow.
// A tensor that the program sets as grad() and keeps must not change afterwards: Follow throws. If
// backward has added to that tensor, the tensor stays in the parameter's grad().
//
// Thread safety: autograd's thread of the device calls Collect. Call other functions while no
// backward runs.

#ifndef PINION_HOOKS_WEIGHTS_HOST_GRADIENTS_H_
#define PINION_HOOKS_WEIGHTS_HOST_GRADIENTS_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "pinion/engine/tier/device_tier.h"
#include "pinion/hooks/weights/leaving_gradients.h"
#include "pinion/hooks/weights/master_watch.h"
#include "pinion/hooks/weights/shown_gradient.h"

namespace pinion {

struct StreamedWeight {
  std::string name;
  c10::weak_intrusive_ptr<c10::TensorImpl> parameter;  // on the device
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;   // the parameter's
  at::Tensor master;                                   // on the host
  std::shared_ptr<MasterWatch> watch;
  uint32_t unit = 0;
};

class HostGradients : public std::enable_shared_from_this<HostGradients> {
 public:
  // `most_leaving`: of units, for LeavingGradients. With `stay`, adds gradients on the device, and
  // copies the sums to the host in Follow. Other functions take the index of a weight in `weights`.
  HostGradients(std::shared_ptr<DeviceTier> tier, std::vector<StreamedWeight> weights,
                size_t most_leaving, bool stay);
  ~HostGradients();

  // Sets hooks on parameters, and makes their grad() show the host copies' gradients.
  void Begin();

  // Moves the parameter's grad() to the host copy. Called by the hook after accumulation. Throws,
  // and names the weight, if the gradient has a graph that the host copy has lost.
  void Collect(size_t index, const at::Tensor& parameter);

  // Blocks until host copies have all gradients, and have the parameters' grad(), requires_grad()
  // and grad_dtype(). Throws, and names the weight, if a host copy cannot follow its parameter.
  void Follow();
  // After Follow: clips all gradients like torch::nn::utils::clip_grad_norm_, in norm 2. Returns
  // the norm before.
  double ClipNorm(double max_norm);
  void Zero();

  uint64_t left_bytes() const { return leaving_.left_bytes(); }

  // --- For ShownGradient ---

  const std::string& NameOf(size_t index) const { return weights_[index].name; }
  bool Shows(size_t index, const ShownGradient& shown) const;
  // Whether autograd is adding to the parameter's grad(), and the program has no hook on it.
  bool IsAccumulating(size_t index) const;
  // Returns the complete gradient, or an undefined tensor.
  at::Tensor Value(size_t index);
  // Adds a gradient that is on the device, and that is not changed afterwards. Throws, and names
  // the weight, if it is sparse.
  void Add(size_t index, const at::Tensor& gradient);
  void Zero(size_t index);

 private:
  struct Weight : StreamedWeight {
    bool requires_grad = false;  // of both, as of the last Follow
    // The grad() of the parameter and of the host copy; null if it is a plain tensor or undefined.
    // While the host copy has one, `sum` has the parts that have arrived.
    std::shared_ptr<ShownGradient> in_parameter = nullptr;
    std::shared_ptr<ShownGradient> on_host = nullptr;
    at::Tensor sum = {};
    at::Tensor staying = {};  // on the device, to be added to `sum`
    bool has_graph = false;   // the parameter's grad() is the whole gradient, with a graph
    // A tensor that the program keeps, and to which backward has added.
    std::optional<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> kept = {};
    // The version of the tensor that the program has set as grad(): now, and when it was taken.
    c10::VariableVersion given = {};
    uint32_t given_version = 0;
    uint32_t epoch = 0;  // copies of earlier epochs are discarded
  };

  at::Tensor ParameterOf(const Weight& weight) const;
  at::Tensor Show(size_t index, std::shared_ptr<ShownGradient>& shown, c10::ScalarType type,
                  c10::Device device);
  void ShowInParameter(size_t index, const at::Tensor& parameter);
  bool HostShows(const Weight& weight) const;
  void SetHook(size_t index, const at::Tensor& parameter);
  // Begins to notice changes of a tensor that the program has set as grad().
  static void Watch(Weight& weight, const c10::VariableVersion& given);
  void TakeGrad(size_t index, const at::Tensor& parameter, bool in_backward);
  // At the first gradient of a backward: forgets gradients that the program has zeroed in their
  // parameter or in the host copy alone. This backward may leave these parameters out.
  void ForgetZeroed();
  void FollowRequiresGrad(Weight& weight, const at::Tensor& parameter);
  // Makes the host copy's grad() show the gradient while parts are under copy.
  void BeginLeaving(size_t index, const at::Tensor& gradient);
  void Arrive();
  void OnArrived(size_t index, uint32_t epoch, const at::Tensor& arrived);
  // Makes the host copy's grad() a plain tensor again.
  void Publish(Weight& weight);
  void Forget(Weight& weight);

  const bool stay_;
  std::vector<Weight> weights_;
  std::vector<size_t> in_unit_;  // by unit: the number of trained weights
  int64_t backward_ = -1;        // the last one that made a gradient, as autograd numbers them
  LeavingGradients leaving_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_WEIGHTS_HOST_GRADIENTS_H_
