// Starts one forward and backward pass whose results the caller waits for later, while the devices
// compute the next pass.
//
//   const std::shared_ptr<HostCopies> copies = session.NewCopies();
//   PendingLayers first = StartGradients(copies, forward, layers, {x}, target);
//   PendingLayers second = StartGradients(copies, forward, layers, {y}, target);
//   first.Wait();                              // while the devices compute the second one
//
// Passes that share `copies` share its bound on pending copies (host_copies.h). Otherwise they
// compute the same as AttributionSession::ComputeLayerGradientsAndEval and EvalLayers.
//
// Thread safety, errors: as for AttributionSession.

#ifndef PINION_HOOKS_ATTRIBUTION_LAYER_PASS_H_
#define PINION_HOOKS_ATTRIBUTION_LAYER_PASS_H_

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/host_copies.h"
#include "pinion/hooks/attribution/layer_options.h"
#include "pinion/hooks/attribution/pending_layers.h"
#include "pinion/hooks/attribution/target.h"

namespace pinion {

// Returns the output of `forward`. c10::Error if `forward` is empty.
at::Tensor OutputOf(const AttributedForward& forward, const std::vector<at::Tensor>& inputs);

// Starts a pass with gradients. Wait of the result calls callbacks.on_arrival; the other callbacks
// are only called before this returns.
PendingLayers StartGradients(const std::shared_ptr<HostCopies>& copies,
                             const AttributedForward& forward,
                             const std::vector<std::string>& layers,
                             const std::vector<at::Tensor>& inputs, const Target& target,
                             const LayerOptions& options = {},
                             const LayerCallbacks& callbacks = {});

PendingLayers StartValues(const std::shared_ptr<HostCopies>& copies,
                          const AttributedForward& forward, const std::vector<std::string>& layers,
                          const std::vector<at::Tensor>& inputs, const LayerOptions& options = {},
                          const LayerCallbacks& callbacks = {});

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_LAYER_PASS_H_
