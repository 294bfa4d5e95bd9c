// One forward, and its backward, whose results are waited for later, when the devices have more to
// do.
//
//   const std::shared_ptr<HostCopies> copies = session.NewCopies();
//   PendingLayers first = StartGradients(copies, forward, layers, {x}, target);
//   PendingLayers second = StartGradients(copies, forward, layers, {y}, target);
//   first.Wait();                              // while the devices compute the second one
//
// Passes that share `copies` hold two captures of each device together (host_copies.h). Otherwise
// they are AttributionSession::ComputeLayerGradientsAndEval and EvalLayers.
//
// Thread safety, errors: as there.

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

// What `forward` returns. c10::Error where it is an empty function.
at::Tensor OutputOf(const AttributedForward& forward, const std::vector<at::Tensor>& inputs);

// Of `callbacks`, on_arrival is called by Wait, and the others are not called any more when this
// returns.
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
