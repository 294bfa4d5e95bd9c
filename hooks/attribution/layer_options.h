// Options, results and callbacks of layer attribution (attribution_session.h). Plain data; a result
// owns its tensors.
//
//   LayerOptions options;
//   options.unused_layers = UnusedLayers::kZeros;
//   const auto layers =
//       session->ComputeLayerGradientsAndEval(forward, {"fc1"}, {x}, Target::Class(3), options);
//
// Thread safety: callbacks run on the threads that run forward and backward
// (attribution_session.h).

#ifndef PINION_HOOKS_ATTRIBUTION_LAYER_OPTIONS_H_
#define PINION_HOOKS_ATTRIBUTION_LAYER_OPTIONS_H_

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <vector>

namespace pinion {

// How to treat layers that forward did not run or that the output does not depend on.
enum class UnusedLayers {
  kError,  // c10::Error that names the layer
  kZeros,  // zero gradients, or no tensors if the layer did not run; see the flags
};

struct LayerOptions {
  UnusedLayers unused_layers = UnusedLayers::kError;
  // Keeps results on the device; parts on several devices are concatenated on the first.
  bool keep_on_device = false;
  // The order in which the devices' parts of a layer are concatenated. It may name devices that
  // have no part. Empty: ascending index.
  std::vector<int> device_ids;
  // False: gradients alone.
  bool activations = true;
};

// One detached tensor of a layer. It is in host memory. Exception: LayerOptions::keep_on_device.
struct LayerTensor {
  at::Tensor activation;   // undefined if not requested
  at::Tensor gradient;     // of the target's outputs, summed; undefined if not requested
  bool connected = false;  // whether a gradient arrived, so the output depends on it
};

// The result of one layer. Duplicate names in the request share their tensors. With keep_on_device,
// layers at one place in the graph may share a gradient's memory.
struct LayerResult {
  bool ran = false;  // the layer's tap was called
  std::vector<LayerTensor> tensors;

  bool connected() const {
    return std::any_of(tensors.begin(), tensors.end(),
                       [](const LayerTensor& tensor) { return tensor.connected; });
  }
};

// Names one tensor of a layer.
struct LayerPart {
  size_t layer = 0;  // index of the layer's first occurrence in the request
  size_t tensor = 0;
};

// Functions that a method runs on the layers' tensors. Each may be empty.
struct LayerCallbacks {
  // Returns the value that replaces the layer's in forward, of the same shape and device; the model
  // continues with a clone. One tensor returned for several calls of a layer gets the gradient of
  // all calls.
  std::function<at::Tensor(LayerPart part, const at::Tensor& value)> replace;
  // Returns the tensor to deliver in place of a value or gradient, like Captum's `output_fn` but
  // per tensor. The tensor is in memory of its own, or in that of the argument. It runs on the
  // device; for a missing gradient it gets zeros on the host, or on the device with keep_on_device.
  // Layers at one place in the graph share one gradient, and the first layer's call decides.
  std::function<at::Tensor(LayerPart part, const at::Tensor& tensor)> output_function;
  // In the order in which the layers become complete, while the device goes on: a value and its
  // gradient have arrived. It may change the value in place, take what it wants, and release the
  // rest.
  std::function<void(LayerPart part, LayerTensor& tensor)> on_arrival;
};

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_LAYER_OPTIONS_H_
