// What attribution is asked about layers, and what it answers.

#ifndef PINION_HOOKS_ATTRIBUTION_LAYER_OPTIONS_H_
#define PINION_HOOKS_ATTRIBUTION_LAYER_OPTIONS_H_

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <vector>

namespace pinion {

// What a layer is whose tap never ran, or of which the output does not depend.
enum class UnusedLayers {
  kError,  // c10::Error that names the layer
  kZeros,  // gradients of zeros, and no tensors at all where the tap never ran; flags say which
};

struct LayerOptions {
  UnusedLayers unused_layers = UnusedLayers::kError;
  // Results stay on the device; those of several devices go to the first one. They may share memory
  // with each other.
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

struct LayerResult {
  bool ran = false;  // the layer's tap was called
  std::vector<LayerTensor> tensors;

  bool connected() const {
    return std::any_of(tensors.begin(), tensors.end(),
                       [](const LayerTensor& tensor) { return tensor.connected; });
  }
};

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_LAYER_OPTIONS_H_
