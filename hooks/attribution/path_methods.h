// Captum's methods that integrate over a path from baselines to inputs, in passes that fit a budget
// for device memory (docs/users/attribution.md).
//
//   pinion::PathOptions options;
//   options.device_budget_bytes = uint64_t{8} << 30;  // instead of an internal batch size
//   const Target target = Target::Class(3);
//   const auto heat = pinion::IntegratedGradients(*session, forward, {x}, target, options);
//   const auto delta =
//       pinion::ConvergenceDelta(*session, forward, heat, {x}, target, options);
//
// Of each pass, gradients are summed over its steps on the device before they leave, and over the
// passes on the host, as they arrive.
//
// A forward function is given rows of several examples and steps in its inputs' first dimension,
// and treats each row alike and by itself.
//
// Thread safety, errors: as the session's. c10::OutOfMemoryError, which names the least budget,
// where the smallest pass does not fit the budget.

#ifndef PINION_HOOKS_ATTRIBUTION_PATH_METHODS_H_
#define PINION_HOOKS_ATTRIBUTION_PATH_METHODS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/layer_methods.h"
#include "pinion/hooks/attribution/layer_options.h"
#include "pinion/hooks/attribution/quadrature.h"
#include "pinion/hooks/attribution/target.h"

namespace pinion {

struct PathOptions {
  int64_t n_steps = 50;
  Quadrature quadrature = Quadrature::kGaussLegendre;
  // Where the path begins: one per input, of its sizes, or with a first dimension of 1, or without
  // dimensions. Empty: zeros.
  std::vector<at::Tensor> baselines = {};
  // Given to forward behind the inputs; not attributed to. The first dimension counts the examples.
  std::vector<at::Tensor> additional_inputs = {};
  // Gradients times the way from the baseline, of the input or of the layer; otherwise gradients
  // alone. InternalInfluence never multiplies, LayerConductance always does.
  bool multiply_by_inputs = true;
  // Of all that LibTorch's allocator has given out, on each device; passes are as large as that
  // lets them be. 0: one pass. Not with LayerOptions::keep_on_device, whose sums would take from
  // it.
  uint64_t device_budget_bytes = 0;
  LayerOptions layers = {};  // `activations` is the method's
};

// Of each input. All inputs are floating-point tensors that `forward` uses as it is given them.
std::vector<at::Tensor> IntegratedGradients(AttributionSession& session,
                                            const AttributedForward& forward,
                                            const std::vector<at::Tensor>& inputs,
                                            const Target& target, const PathOptions& options = {});

// The path is that of the layers' values, which take the place of what the model computes there.
// No layer may depend on another one of the list. Inputs may be integers. Each layer is on one
// device, which holds its values at both ends for the examples of a pass.
std::vector<LayerAttribution> LayerIntegratedGradients(AttributionSession& session,
                                                       const AttributedForward& forward,
                                                       const std::vector<std::string>& layers,
                                                       const std::vector<at::Tensor>& inputs,
                                                       const Target& target,
                                                       const PathOptions& options = {});

// The layers' gradients along the inputs' path.
std::vector<LayerAttribution> InternalInfluence(AttributionSession& session,
                                                const AttributedForward& forward,
                                                const std::vector<std::string>& layers,
                                                const std::vector<at::Tensor>& inputs,
                                                const Target& target,
                                                const PathOptions& options = {});

// The layers' gradients times the layers' changes from step to step of the inputs' path.
std::vector<LayerAttribution> LayerConductance(AttributionSession& session,
                                               const AttributedForward& forward,
                                               const std::vector<std::string>& layers,
                                               const std::vector<at::Tensor>& inputs,
                                               const Target& target,
                                               const PathOptions& options = {});

// By example, on the host: how far attributions, of all inputs or of one layer, are from adding up
// to the change of the target's output from baseline to input.
at::Tensor ConvergenceDelta(AttributionSession& session, const AttributedForward& forward,
                            const std::vector<at::Tensor>& attributions,
                            const std::vector<at::Tensor>& inputs, const Target& target,
                            const PathOptions& options = {});

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_PATH_METHODS_H_
