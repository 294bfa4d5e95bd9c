#include "pinion/hooks/attribution/layer_methods.h"

#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <torch/nn/functional/upsampling.h>

#include <functional>
#include <numeric>
#include <utility>

#include "pinion/hooks/attribution/tap.h"

namespace pinion {
namespace {

using Combine = std::function<at::Tensor(const LayerTensor& tensor)>;

std::vector<LayerAttribution> CombineLayers(std::vector<LayerResult> layers,
                                            const Combine& combine) {
  const at::NoGradGuard no_grad;
  std::vector<LayerAttribution> attributions;
  for (LayerResult& layer : layers) {
    LayerAttribution& attribution = attributions.emplace_back();
    attribution.ran = layer.ran;
    attribution.connected = layer.connected();
    for (LayerTensor& tensor : layer.tensors) {
      attribution.tensors.push_back(combine(tensor));
      tensor = LayerTensor();  // the host needs its memory no more
    }
  }
  return attributions;
}

at::Tensor Product(const LayerTensor& tensor) { return tensor.gradient * tensor.activation; }
at::Tensor Gradient(const LayerTensor& tensor) { return tensor.gradient; }

LayerOptions WithActivations(LayerOptions options, bool activations) {
  options.activations = activations;
  return options;
}

std::vector<at::Tensor> AttributeToInputs(AttributionSession& session,
                                          const AttributedForward& forward,
                                          const std::vector<at::Tensor>& inputs,
                                          const Target& target, const LayerOptions& options,
                                          const Combine& combine) {
  static constexpr char kInputs[] = "pinion.inputs";
  TORCH_CHECK(!inputs.empty(), "there is no input to attribute to");
  const auto tapped = [&forward](const std::vector<at::Tensor>& given) {
    return forward(Tap(kInputs, given));
  };
  return std::move(
      CombineLayers(
          session.ComputeLayerGradientsAndEval(tapped, {kInputs}, inputs, target, options), combine)
          .front()
          .tensors);
}

}  // namespace

std::vector<LayerAttribution> LayerActivation(AttributionSession& session,
                                              const AttributedForward& forward,
                                              const std::vector<std::string>& layers,
                                              const std::vector<at::Tensor>& inputs,
                                              const LayerOptions& options) {
  return CombineLayers(session.EvalLayers(forward, layers, inputs, WithActivations(options, true)),
                       [](const LayerTensor& tensor) { return tensor.activation; });
}

std::vector<LayerAttribution> LayerGradientXActivation(
    AttributionSession& session, const AttributedForward& forward,
    const std::vector<std::string>& layers, const std::vector<at::Tensor>& inputs,
    const Target& target, const LayerOptions& options, bool multiply_by_inputs) {
  return CombineLayers(
      session.ComputeLayerGradientsAndEval(forward, layers, inputs, target,
                                           WithActivations(options, multiply_by_inputs)),
      multiply_by_inputs ? Product : Gradient);
}

std::vector<LayerAttribution> LayerGradCam(AttributionSession& session,
                                           const AttributedForward& forward,
                                           const std::vector<std::string>& layers,
                                           const std::vector<at::Tensor>& inputs,
                                           const Target& target, const LayerOptions& options,
                                           const GradCamOptions& grad_cam) {
  const auto combine = [&grad_cam](const LayerTensor& tensor) {
    at::Tensor weights = tensor.gradient;
    if (weights.dim() > 2) {
      std::vector<int64_t> space(static_cast<size_t>(weights.dim()) - 2);
      std::iota(space.begin(), space.end(), 2);
      weights = weights.mean(space, /*keepdim=*/true);
    }
    at::Tensor map = weights * tensor.activation;
    if (grad_cam.sum_channels) map = map.sum(1, /*keepdim=*/true);
    return grad_cam.relu_attributions ? map.relu() : map;
  };
  return CombineLayers(session.ComputeLayerGradientsAndEval(forward, layers, inputs, target,
                                                            WithActivations(options, true)),
                       combine);
}

at::Tensor Interpolate(const at::Tensor& attribution, const std::vector<int64_t>& sizes,
                       const InterpolateMode& mode) {
  std::vector<int64_t> all = sizes;
  if (sizes.size() == 1 && attribution.dim() > 3) {
    all.assign(static_cast<size_t>(attribution.dim()) - 2, sizes.front());
  }
  return torch::nn::functional::interpolate(
      attribution, torch::nn::functional::InterpolateFuncOptions().size(all).mode(mode));
}

std::vector<at::Tensor> Saliency(AttributionSession& session, const AttributedForward& forward,
                                 const std::vector<at::Tensor>& inputs, const Target& target,
                                 const LayerOptions& options, bool absolute) {
  return AttributeToInputs(session, forward, inputs, target, WithActivations(options, false),
                           [absolute](const LayerTensor& tensor) {
                             return absolute ? tensor.gradient.abs() : tensor.gradient;
                           });
}

std::vector<at::Tensor> InputXGradient(AttributionSession& session,
                                       const AttributedForward& forward,
                                       const std::vector<at::Tensor>& inputs, const Target& target,
                                       const LayerOptions& options) {
  return AttributeToInputs(session, forward, inputs, target, WithActivations(options, true),
                           Product);
}

}  // namespace pinion
