// What attribution is asked about layers, and what it answers. Plain data; a result owns its
// tensors (attribution_session.h).
//
//   LayerOptions options;
//   options.unused_layers = UnusedLayers::kZeros;
//   const auto layers =
//       session->ComputeLayerGradientsAndEval(forward, {"fc1"}, {x}, Target::Class(3), options);
//
// Thread safety: callbacks are called on the threads that run forward and backward
// (attribution_session.h).

#ifndef PINION_HOOKS_ATTRIBUTION_LAYER_OPTIONS_H_
#define PINION_HOOKS_ATTRIBUTION_LAYER_OPTIONS_H_

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace pinion {

// What a layer is whose tap never ran, or of which the output does not depend.
enum class UnusedLayers {
  kError,  // c10::Error that names the layer
  kZeros,  // gradients of zeros, and no tensors at all where the tap never ran; flags say which
};

struct LayerOptions {
  UnusedLayers unused_layers = UnusedLayers::kError;
  // Results stay on the device; those of several devices go to the first one.
  bool keep_on_device = false;
  // The order in which the devices' parts of a layer are concatenated; it may name more devices
  // than there are parts. Empty: by rising index.
  std::vector<int> device_ids;
  // False: gradients alone.
  bool activations = true;
};

// Detached; in host memory unless LayerOptions::keep_on_device.
struct LayerTensor {
  at::Tensor activation;   // undefined unless asked for
  at::Tensor gradient;     // of the sum of the target's outputs; undefined unless asked for
  bool connected = false;  // the output depends on it: a gradient came
};

// Layers that are asked for twice have the same tensors; layers of one place in the graph may share
// a gradient's memory on the device.
struct LayerResult {
  bool ran = false;  // the layer's tap was called
  std::vector<LayerTensor> tensors;

  bool connected() const {
    return std::any_of(tensors.begin(), tensors.end(),
                       [](const LayerTensor& tensor) { return tensor.connected; });
  }
};

// One of the tensors that a layer consists of.
struct LayerPart {
  size_t layer = 0;  // in the list of layers that were asked for; the first one of that name
  size_t tensor = 0;
};

// What a method does with layers' tensors on their way. Each may be empty.
struct LayerCallbacks {
  // In forward, ahead of everything else: what the layer's value is instead, of the same shape.
  // Where it is one tensor for several calls of a layer, the gradient is that of all of them. The
  // model goes on with a clone.
  std::function<at::Tensor(LayerPart part, const at::Tensor& value)> replace;
  // On the device: what leaves instead of a value, and instead of a gradient, in memory of its own
  // (Captum's `output_fn`, tensor by tensor). It is given zeros on the host where there was no
  // gradient. Layers of one place in the graph have one gradient, and the first one's function.
  std::function<at::Tensor(LayerPart part, const at::Tensor& tensor)> output_function;
  // In the order in which the layers become complete, while the device goes on: a value and its
  // gradient have arrived. It may change the value in place, take what it wants, and release the
  // rest.
  std::function<void(LayerPart part, LayerTensor& tensor)> on_arrival;
};

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_LAYER_OPTIONS_H_
