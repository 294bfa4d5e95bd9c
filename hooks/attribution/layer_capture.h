// One forward, and at most one backward, of an attribution: what the taps of the wanted layers have
// seen, and the gradients that backward has passed them.
//
// What is captured is the value at the tap and the gradient with respect to it, whatever the model
// does to the tensor later. A tensor whose place in the graph an operator in place would take goes
// on as a clone. So does a tensor without history and without another owner, which is offloaded
// itself (docs/maintainers/decisions/0032).
//
// Backward runs from the output to the captured tensors and no further; no parameter's .grad is
// touched. Each gradient is taken by a hook as soon as it is complete, and the graph keeps none of
// those that backward does not need itself.
//
// It lives until the devices' work is queued: what it has captured is on its way by itself then
// (pending_layers.h), so that the next pass can begin.
//
// Thread safety: taps may come on several threads, gradients on autograd's; all other calls on one
// thread, once the taps have come.

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
  ~LayerCapture() override;  // tensors that were given a history for this have none again

  std::vector<at::Tensor> OnTap(std::string_view name, std::vector<at::Tensor> tensors) override;

  // `selected` has one number per example.
  void Backward(const at::Tensor& selected);

  // What was captured, once backward is through if there is one.
  PendingLayers Finish();

 private:
  // Of the first layer of that name; their number if nobody asks for it.
  size_t PlaceOf(std::string_view name) const;
  // What the model goes on with; fills the gradient's slot.
  at::Tensor Watch(LayerPart part, const at::Tensor& tensor, LayerPiece& piece);
  // Has `undo` called when the capture ends.
  void Undo(std::function<void()> undo);

  const std::vector<std::string> layers_;
  const Mode mode_;
  const std::shared_ptr<LayerWay> way_;

  Mutex mu_;
  std::map<size_t, PiecesByDevice> captured_ ABSL_GUARDED_BY(mu_);  // by layer
  // By place in the graph. What a later call of the same layer has replaced is expired.
  struct Watched {
    torch::autograd::Edge edge;
    std::weak_ptr<GradientSlot> slot;
  };
  using Places = std::map<std::pair<const torch::autograd::Node*, uint32_t>, Watched>;
  Places watched_ ABSL_GUARDED_BY(mu_);
  // What was changed in tensors of the program's.
  std::vector<std::function<void()>> undo_ ABSL_GUARDED_BY(mu_);
};

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_LAYER_CAPTURE_H_
