// One forward, and at most one backward, of an attribution: what the taps of the wanted layers have
// seen, and the gradients that backward has passed them.
//
// What is captured is the value at the tap and the gradient with respect to it, whatever the model
// does to the tensor later. A tensor whose place in the graph an operator in place would take goes
// on as a clone (docs/decisions/0032-attribution.md).
//
// Backward runs from the output to the captured tensors and no further; no parameter's .grad is
// touched. Each gradient is taken by a hook as soon as it is complete, and the graph keeps none of
// those that backward does not need itself.
//
// Thread safety: taps and all calls on one thread; gradients may come on autograd's.

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
#include "pinion/hooks/attribution/layer_options.h"
#include "pinion/hooks/attribution/tap.h"

namespace pinion {

class LayerCapture final : public TapListener {
 public:
  enum class Mode { kValues, kGradients };

  LayerCapture(const std::vector<std::string>& layers, Mode mode, const LayerOptions& options,
               std::shared_ptr<HostCopies> copies);
  ~LayerCapture() override;  // tensors that were given a history for this have none again

  std::vector<at::Tensor> OnTap(std::string_view name, std::vector<at::Tensor> tensors) override;

  // `selected` has one number per example.
  void Backward(const at::Tensor& selected);

  // In the order of the layers, as LayerOptions say. Blocks until all copies are done.
  std::vector<LayerResult> Results();

 private:
  // A tensor on its way to whoever asked for it.
  struct Delivery {
    at::Tensor kept;  // on the device, or:
    HostCopy copy;
    at::Tensor Wait() const { return kept.defined() ? kept : copy.Wait(); }
  };

  // Where the gradient of one place in the graph goes.
  class GradientSlot {
   public:
    GradientSlot(bool keep_on_device, std::shared_ptr<HostCopies> copies)
        : keep_on_device_(keep_on_device), copies_(std::move(copies)) {}

    // Backward asks for this gradient by name and needs it for nothing else.
    void EndBackwardHere() { ends_here_ = true; }
    // What backward goes on with.
    at::Tensor Take(const at::Tensor& gradient);
    // Undefined: there was none.
    at::Tensor Wait();

   private:
    const bool keep_on_device_;
    const std::shared_ptr<HostCopies> copies_;
    bool ends_here_ = false;

    Mutex mu_;
    Delivery delivery_ ABSL_GUARDED_BY(mu_);
    bool has_come_ ABSL_GUARDED_BY(mu_) = false;
  };

  // One of a layer's tensors, on one device.
  struct Piece {
    std::vector<int64_t> sizes;
    at::TensorOptions options;
    Delivery activation;
    std::shared_ptr<GradientSlot> gradient;
  };
  using Pieces = std::vector<Piece>;
  using PiecesByDevice = std::map<int, Pieces>;  // -1: the CPU

  // What the model goes on with; fills the gradient's slot.
  at::Tensor Watch(std::string_view name, const at::Tensor& tensor, Piece& piece);
  std::vector<const Pieces*> InDeviceOrder(const std::string& layer,
                                           const PiecesByDevice& by_device) const;
  LayerTensor Gather(const std::vector<const Pieces*>& devices, size_t index) const;
  at::Tensor Join(const std::vector<at::Tensor>& pieces) const;

  const std::vector<std::string> layers_;
  const Mode mode_;
  const LayerOptions options_;
  const std::shared_ptr<HostCopies> copies_;

  std::map<std::string, PiecesByDevice, std::less<>> captured_;
  // By place in the graph. What a later call of the same layer has replaced is expired.
  struct Watched {
    torch::autograd::Edge edge;
    std::weak_ptr<GradientSlot> slot;
  };
  std::map<std::pair<const torch::autograd::Node*, uint32_t>, Watched> watched_;
  std::vector<std::function<void()>> undo_;  // what was changed in tensors of the program's
};

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_LAYER_CAPTURE_H_
