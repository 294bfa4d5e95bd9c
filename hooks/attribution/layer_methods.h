// Captum's methods that are products of activations and gradients (docs/users/attribution.md has
// the table). Products are computed on the host layer by layer, as their parts arrive, in place; on
// the device with LayerOptions::keep_on_device.
//
//   const auto maps = pinion::LayerGradCam(*session, forward, {"conv4"}, {x}, Target::Class(3));
//   at::Tensor heat = pinion::Interpolate(maps[0].tensors[0], {32, 32}, torch::kBilinear);
//
// Thread safety, errors: as for AttributionSession.

#ifndef PINION_HOOKS_ATTRIBUTION_LAYER_METHODS_H_
#define PINION_HOOKS_ATTRIBUTION_LAYER_METHODS_H_

#include <ATen/core/Tensor.h>
#include <torch/nn/options/upsampling.h>

#include <cstdint>
#include <string>
#include <vector>

#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/layer_options.h"
#include "pinion/hooks/attribution/target.h"

namespace pinion {

// The attribution of one layer, which may consist of several tensors.
struct LayerAttribution {
  bool ran = false;        // the layer's tap was called
  bool connected = false;  // the output depends on one of its tensors; false for LayerActivation
  std::vector<at::Tensor> tensors;
};

std::vector<LayerAttribution> LayerActivation(AttributionSession& session,
                                              const AttributedForward& forward,
                                              const std::vector<std::string>& layers,
                                              const std::vector<at::Tensor>& inputs,
                                              const LayerOptions& options = {});

// Returns gradient times activation, or the gradient alone if `multiply_by_inputs` is false.
std::vector<LayerAttribution> LayerGradientXActivation(
    AttributionSession& session, const AttributedForward& forward,
    const std::vector<std::string>& layers, const std::vector<at::Tensor>& inputs,
    const Target& target, const LayerOptions& options = {}, bool multiply_by_inputs = true);

struct GradCamOptions {
  bool relu_attributions = false;
  bool sum_channels = true;  // over dimension 1, whose size becomes 1
};

// Returns activations weighted by their gradients' means over dimensions 2 and up.
std::vector<LayerAttribution> LayerGradCam(AttributionSession& session,
                                           const AttributedForward& forward,
                                           const std::vector<std::string>& layers,
                                           const std::vector<at::Tensor>& inputs,
                                           const Target& target, const LayerOptions& options = {},
                                           const GradCamOptions& grad_cam = {});

// Resizes the spatial dimensions (one to three, from the third on) of an attribution to `sizes`,
// for example to overlay it on an input. A single size applies to all of them.
using InterpolateMode = torch::nn::functional::InterpolateFuncOptions::mode_t;
at::Tensor Interpolate(const at::Tensor& attribution, const std::vector<int64_t>& sizes,
                       const InterpolateMode& mode = torch::kNearest);

// Returns the gradient with respect to each input, or its absolute value if `absolute`. All inputs
// must be floating-point tensors, and `forward` must use the tensors that it is given.
std::vector<at::Tensor> Saliency(AttributionSession& session, const AttributedForward& forward,
                                 const std::vector<at::Tensor>& inputs, const Target& target,
                                 const LayerOptions& options = {}, bool absolute = true);

// Returns gradient times input, for each input.
std::vector<at::Tensor> InputXGradient(AttributionSession& session,
                                       const AttributedForward& forward,
                                       const std::vector<at::Tensor>& inputs, const Target& target,
                                       const LayerOptions& options = {});

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_LAYER_METHODS_H_
