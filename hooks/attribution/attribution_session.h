// Which parts of a model's inputs, or of its layers, an output comes from, without holding the
// layers on the device: Captum's core for LibTorch programs (docs/users/attribution.md).
//
//   const auto session = pinion::AttributionSession::Create({}, pinion::CudaBackend()).value();
//   const auto forward = [&](const std::vector<at::Tensor>& x) { return model->forward(x[0]); };
//   const auto layers = session->ComputeLayerGradientsAndEval(
//       forward, {"conv1", "fc1.input"}, {x}, pinion::Target::Class(3));
//   layers[0].tensors[0].activation;   // in pinned host memory, and .gradient with it
//
// The names are those of taps in the model (tap.h), or of modules that were wrapped
// (tapped_module.h). Activations leave the device in forward and gradients as backward passes them,
// on the streams that all of Pinion's copies share; of each device no more wait there for their
// copies than the two largest would take. Methods on top of this are in layer_methods.h.
//
// Thread safety: thread-safe; taps are seen on the thread that calls, and on those that stand in
// for it (TapHandover), gradients on whatever thread autograd uses. A tensor without history can be
// tapped in one call at a time.
// Ownership: results own their host memory and may outlive the session.
// Errors: c10::Error, from forward and backward too, for layers and targets that do not fit;
// c10::OutOfMemoryError where the budget for pinned memory has no room for a result.

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

// The model, and whatever further arguments it takes.
using AttributedForward = std::function<at::Tensor(const std::vector<at::Tensor>& inputs)>;

class AttributionSession {
 public:
  // Results go to the pool of pinned memory that sessions and pin_memory() share: errors as those
  // of OffloadSession::Create. With PINION_DISABLE=1 in the environment it asks for no device, and
  // copies are LibTorch's own.
  static absl::StatusOr<std::shared_ptr<AttributionSession>> Create(const HostTierOptions& options,
                                                                    const DeviceBackend& backend);

  c10::DeviceType device_type() const { return type_; }

  // `tier`, of devices of this type, may be null.
  AttributionSession(std::shared_ptr<HostTier> tier, c10::DeviceType type);

  // The layers' values, and the gradients with respect to them of the sum over all examples of the
  // target's outputs. In the order of `layers`; the last call of a layer counts.
  std::vector<LayerResult> ComputeLayerGradientsAndEval(const AttributedForward& forward,
                                                        const std::vector<std::string>& layers,
                                                        const std::vector<at::Tensor>& inputs,
                                                        const Target& target,
                                                        const LayerOptions& options = {},
                                                        const LayerCallbacks& callbacks = {});

  // The layers' values alone, of a forward that records no graph.
  std::vector<LayerResult> EvalLayers(const AttributedForward& forward,
                                      const std::vector<std::string>& layers,
                                      const std::vector<at::Tensor>& inputs,
                                      const LayerOptions& options = {},
                                      const LayerCallbacks& callbacks = {});

  // For passes one behind the other (layer_pass.h): how the tensors of all of them leave.
  std::shared_ptr<HostCopies> NewCopies() const;

  // Tensors behind each other on dimension 0: on the host in pinned memory, as results are. Not
  // empty.
  at::Tensor Concatenate(const std::vector<at::Tensor>& parts) const;

 private:
  const std::shared_ptr<HostTier> tier_;
  const c10::DeviceType type_;
};

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_ATTRIBUTION_SESSION_H_
