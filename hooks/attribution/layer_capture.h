// Captures the values at the taps of the requested layers in one forward pass, and their gradients
// in one backward pass.
//
// Captures the value at the tap and the gradient with respect to it. Later changes of the tensor by
// the model have no effect. A tensor whose place in the graph an operator in place would take goes
// on as a clone. So does a tensor without history and without another owner, which is offloaded
// itself (docs/maintainers/decisions/0032).
//
// Backward stops at the captured tensors and leaves every parameter's .grad alone. A hook takes
// each gradient when it is complete, so the graph keeps only gradients that backward itself needs.
//
// A LayerCapture lives until the devices' work is queued. PendingLayers then owns the copies, and
// the next pass can begin.
//
// Thread safety: OnTap may run on several threads, gradient hooks run on autograd's threads. All
// other calls come from one thread after the last tap.

#ifndef PINION_HOOKS_ATTRIBUTION_LAYER_CAPTURE_H_
#define PINION_HOOKS_ATTRIBUTION_LAYER_CAPTURE_H_

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/TensorImpl.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/hooks/attribution/host_copies.h"
#include "pinion/hooks/attribution/layer_delivery.h"
#include "pinion/hooks/attribution/layer_options.h"
#include "pinion/hooks/attribution/pending_layers.h"
#include "pinion/hooks/attribution/tap.h"

namespace pinion {

class LayerCapture final : public TapListener {
 public:
  enum class Mode { kValues, kGradients };

  LayerCapture(const std::vector<std::string>& layers, Mode mode, const LayerOptions& options,
               const LayerCallbacks& callbacks, std::shared_ptr<HostCopies> copies);
  ~LayerCapture() override;  // removes the histories and hooks that taps added

  std::vector<at::Tensor> OnTap(std::string_view name, std::vector<at::Tensor> tensors) override;

  // Runs backward from `selected`, which has one number per example.
  void Backward(const at::Tensor& selected);

  // Returns the captured tensors; call it after Backward, if there is one.
  PendingLayers Finish();

 private:
  // Returns the index of the first layer of that name, or the number of layers if none has it.
  size_t PlaceOf(std::string_view name) const;
  // Registers for the tensor's gradient in `piece` and returns the tensor for the model.
  at::Tensor Watch(LayerPart part, const at::Tensor& tensor, LayerPiece& piece);
  // Registers `undo` to be called by the destructor.
  void Undo(std::function<void()> undo);

  const std::vector<std::string> layers_;
  const Mode mode_;
  const std::shared_ptr<LayerWay> way_;

  Mutex mu_;
  std::map<size_t, PiecesByDevice> captured_ ABSL_GUARDED_BY(mu_);  // by layer
  // By place in the graph. A slot expires when a later call of the same layer replaces it.
  struct Watched {
    torch::autograd::Edge edge;
    std::weak_ptr<GradientSlot> slot;
  };
  using Places = std::map<std::pair<const torch::autograd::Node*, uint32_t>, Watched>;
  Places watched_ ABSL_GUARDED_BY(mu_);
  // Reverts changes to the program's tensors.
  std::vector<std::function<void()>> undo_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_LAYER_CAPTURE_H_
