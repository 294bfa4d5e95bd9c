#include "pinion/hooks/attribution/layer_methods.h"

#include <ATen/TensorOperators.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/nn/functional/upsampling.h>

#include <numeric>
#include <utility>
#include <variant>

#include "pinion/device/host_arithmetic.h"
#include "pinion/hooks/attribution/layer_pass.h"
#include "pinion/hooks/attribution/tap.h"

namespace pinion {
namespace {

// `combine` leaves what it makes of a tensor as its activation, in place.
LayerCallbacks OnArrival(decltype(LayerCallbacks::on_arrival) combine) {
  LayerCallbacks callbacks;
  callbacks.on_arrival = std::move(combine);
  return callbacks;
}

void Multiply(LayerPart, LayerTensor& tensor) {
  tensor.activation.mul_(tensor.gradient);
  tensor.gradient = at::Tensor();
  if (tensor.activation.is_cpu()) CountHostArithmetic(3 * tensor.activation.nbytes());
}

void TakeGradient(LayerPart, LayerTensor& tensor) {
  tensor.activation = std::move(tensor.gradient);
}

std::vector<LayerAttribution> AttributionsOf(std::vector<LayerResult> layers) {
  std::vector<LayerAttribution> attributions;
  for (LayerResult& layer : layers) {
    LayerAttribution& attribution = attributions.emplace_back();
    attribution.ran = layer.ran;
    attribution.connected = layer.connected();
    for (LayerTensor& tensor : layer.tensors) {
      attribution.tensors.push_back(std::move(tensor.activation));
    }
  }
  return attributions;
}

LayerOptions WithActivations(LayerOptions options, bool activations) {
  options.activations = activations;
  return options;
}

std::vector<at::Tensor> AttributeToInputs(AttributionSession& session,
                                          const AttributedForward& forward,
                                          const std::vector<at::Tensor>& inputs,
                                          const Target& target, const LayerOptions& options,
                                          const LayerCallbacks& callbacks) {
  static constexpr char kInputs[] = "pinion.inputs";
  TORCH_CHECK(!inputs.empty(), "there is no input to attribute to");
  // Aliases leave the caller's tensors untouched, so that other threads may attribute to them too.
  std::vector<at::Tensor> aliases;
  for (size_t i = 0; i < inputs.size(); ++i) {
    TORCH_CHECK(torch::autograd::isDifferentiableType(inputs[i].scalar_type()), "input ", i,
                " is of ", inputs[i].scalar_type(),
                ", which has no gradient: let the forward function capture it");
    const at::Tensor alias = inputs[i].variable_data();
    aliases.push_back(inputs[i].requires_grad() ? alias.clone() : alias);
  }
  const auto tapped = [&forward](const std::vector<at::Tensor>& given) {
    return OutputOf(forward, Tap(kInputs, given));
  };
  return std::move(AttributionsOf(session.ComputeLayerGradientsAndEval(tapped, {kInputs}, aliases,
                                                                       target, options, callbacks))
                       .front()
                       .tensors);
}

}  // namespace

std::vector<LayerAttribution> LayerActivation(AttributionSession& session,
                                              const AttributedForward& forward,
                                              const std::vector<std::string>& layers,
                                              const std::vector<at::Tensor>& inputs,
                                              const LayerOptions& options) {
  return AttributionsOf(
      session.EvalLayers(forward, layers, inputs, WithActivations(options, true)));
}

std::vector<LayerAttribution> LayerGradientXActivation(
    AttributionSession& session, const AttributedForward& forward,
    const std::vector<std::string>& layers, const std::vector<at::Tensor>& inputs,
    const Target& target, const LayerOptions& options, bool multiply_by_inputs) {
  return AttributionsOf(session.ComputeLayerGradientsAndEval(
      forward, layers, inputs, target, WithActivations(options, multiply_by_inputs),
      OnArrival(multiply_by_inputs ? Multiply : TakeGradient)));
}

std::vector<LayerAttribution> LayerGradCam(AttributionSession& session,
                                           const AttributedForward& forward,
                                           const std::vector<std::string>& layers,
                                           const std::vector<at::Tensor>& inputs,
                                           const Target& target, const LayerOptions& options,
                                           const GradCamOptions& grad_cam) {
  const auto combine = [&grad_cam](LayerPart, LayerTensor& tensor) {
    const uint64_t layer_bytes = tensor.activation.nbytes();
    at::Tensor weights = std::move(tensor.gradient);
    if (weights.dim() > 2) {
      std::vector<int64_t> space(static_cast<size_t>(weights.dim()) - 2);
      std::iota(space.begin(), space.end(), 2);
      weights = weights.mean(space, /*keepdim=*/true);
    }
    at::Tensor& map = tensor.activation;
    TORCH_CHECK(map.dim() > 1, "a map of a layer of ", map.sizes(),
                ": Grad-CAM needs examples in the first dimension and channels in the second");
    map.mul_(weights);
    if (grad_cam.sum_channels) map = map.sum(1, /*keepdim=*/true);
    if (grad_cam.relu_attributions) map.relu_();
    if (map.is_cpu()) CountHostArithmetic(4 * layer_bytes);
  };
  return AttributionsOf(session.ComputeLayerGradientsAndEval(
      forward, layers, inputs, target, WithActivations(options, true), OnArrival(combine)));
}

at::Tensor Interpolate(const at::Tensor& attribution, const std::vector<int64_t>& sizes,
                       const InterpolateMode& mode) {
  TORCH_CHECK(attribution.defined(),
              "the attribution to interpolate is undefined: give one of a layer that ran");
  TORCH_CHECK(attribution.dim() >= 3 && attribution.dim() <= 5, "an attribution of ",
              attribution.sizes(), attribution.dim() < 3 ? " has no" : " has too many",
              " spatial dimensions: interpolation needs one to three, from the third on");
  const auto spatial_dimensions = static_cast<size_t>(attribution.dim()) - 2;
  TORCH_CHECK(sizes.size() == 1 || sizes.size() == spatial_dimensions, sizes.size(),
              " sizes for the ", spatial_dimensions, " spatial dimensions of ", attribution.sizes(),
              ": give one each, or one for all");
  for (const int64_t size : sizes) {
    TORCH_CHECK(size > 0, "interpolation to a size of ", size, ": sizes are at least 1");
  }
  std::vector<int64_t> all = sizes;
  if (sizes.size() == 1) all.assign(spatial_dimensions, sizes.front());
  auto options = torch::nn::functional::InterpolateFuncOptions().size(all).mode(mode);
  // False is LibTorch's default; setting it avoids a warning. Only interpolating modes accept it.
  if (std::holds_alternative<torch::enumtype::kLinear>(mode) ||
      std::holds_alternative<torch::enumtype::kBilinear>(mode) ||
      std::holds_alternative<torch::enumtype::kBicubic>(mode) ||
      std::holds_alternative<torch::enumtype::kTrilinear>(mode)) {
    options.align_corners(false);
  }
  return torch::nn::functional::interpolate(attribution, options);
}

std::vector<at::Tensor> Saliency(AttributionSession& session, const AttributedForward& forward,
                                 const std::vector<at::Tensor>& inputs, const Target& target,
                                 const LayerOptions& options, bool absolute) {
  LayerCallbacks callbacks = OnArrival(TakeGradient);
  if (absolute) {
    callbacks.output_function = [](LayerPart, const at::Tensor& gradient) {
      return gradient.abs();
    };
  }
  return AttributeToInputs(session, forward, inputs, target, WithActivations(options, false),
                           callbacks);
}

std::vector<at::Tensor> InputXGradient(AttributionSession& session,
                                       const AttributedForward& forward,
                                       const std::vector<at::Tensor>& inputs, const Target& target,
                                       const LayerOptions& options) {
  return AttributeToInputs(session, forward, inputs, target, WithActivations(options, true),
                           OnArrival(Multiply));
}

}  // namespace pinion
