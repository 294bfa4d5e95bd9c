// Which parts of a model's inputs, or of its layers, an output comes from, without holding the
// layers on the device: Captum's core for LibTorch programs (docs/users/attribution.md).
//
//   const auto session = pinion::AttributionSession::Create({}, pinion::CudaBackend()).value();
//   const auto forward = [&](const std::vector<at::Tensor>& x) { return model->forward(x[0]); };
//   const auto layers = session->ComputeLayerGradientsAndEval(
//       forward, {"conv1", "fc1.input"}, {x}, pinion::Target::Class(3));
//   layers[0].tensors[0].activation;   // in pinned host memory, and .gradient with it
//
// A layer's name is that of a tap in the model (tap.h) or of a wrapped module (tapped_module.h).
// Activations are copied to the host during forward and gradients during backward, on Pinion's
// shared copy streams. Per device, tensors whose copies are pending take at most the bytes of the
// two largest ones. layer_methods.h and path_methods.h have methods built on this class.
//
// Thread safety: thread-safe. A call sees taps on its own thread and on threads that hold its
// TapHandover; gradients arrive on autograd's threads. Only one call at a time may tap a tensor
// that has no autograd history.
// Ownership: results own their host memory and may outlive the session.
// Errors: c10::Error for layers and targets that do not fit, and from forward and backward;
// c10::OutOfMemoryError when a result exceeds the budget for pinned memory.

#ifndef PINION_HOOKS_ATTRIBUTION_ATTRIBUTION_SESSION_H_
#define PINION_HOOKS_ATTRIBUTION_ATTRIBUTION_SESSION_H_

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "pinion/device/device_backend.h"
#include "pinion/engine/tier/host_tier.h"
#include "pinion/hooks/attribution/layer_options.h"
#include "pinion/hooks/attribution/target.h"

namespace pinion {

class HostCopies;

// Runs the model on `inputs`; captures further arguments itself.
using AttributedForward = std::function<at::Tensor(const std::vector<at::Tensor>& inputs)>;

class AttributionSession {
 public:
  // Creates a session whose results are in the pinned-memory pool that sessions and pin_memory()
  // share. Fails like OffloadSession::Create. With PINION_DISABLE=1 in the environment, it opens no
  // device and results are copied by LibTorch.
  static absl::StatusOr<std::shared_ptr<AttributionSession>> Create(const HostTierOptions& options,
                                                                    const DeviceBackend& backend);

  c10::DeviceType device_type() const { return type_; }

  // Takes a `tier` for devices of this type, or null: then LibTorch copies the results.
  AttributionSession(std::shared_ptr<HostTier> tier, c10::DeviceType type);

  // Returns each layer's values and the gradient of the target outputs' sum over all examples, in
  // the order of `layers`. If a layer runs several times, the last call counts.
  std::vector<LayerResult> ComputeLayerGradientsAndEval(const AttributedForward& forward,
                                                        const std::vector<std::string>& layers,
                                                        const std::vector<at::Tensor>& inputs,
                                                        const Target& target,
                                                        const LayerOptions& options = {},
                                                        const LayerCallbacks& callbacks = {});

  // Returns each layer's values, from a forward pass without an autograd graph.
  std::vector<LayerResult> EvalLayers(const AttributedForward& forward,
                                      const std::vector<std::string>& layers,
                                      const std::vector<at::Tensor>& inputs,
                                      const LayerOptions& options = {},
                                      const LayerCallbacks& callbacks = {});

  // Returns a new queue of copies, which consecutive passes may share (layer_pass.h).
  std::shared_ptr<HostCopies> NewCopies() const;

  // Concatenates `parts` on dimension 0; parts on the host go to pinned memory, as results do.
  // `parts` must not be empty.
  at::Tensor Concatenate(const std::vector<at::Tensor>& parts) const;

 private:
  const std::shared_ptr<HostTier> tier_;
  const c10::DeviceType type_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_ATTRIBUTION_SESSION_H_
