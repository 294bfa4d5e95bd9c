// A lower bound on the time of forward and backward for layer-by-layer weight streaming that keeps
// the link busy. Needs at least two layers.
//
// Pure functions.

#ifndef PINION_BENCH_WEIGHTS_PHASE_BOUND_H_
#define PINION_BENCH_WEIGHTS_PHASE_BOUND_H_

#include <cstdint>

#include "pinion/device/emulated/cost_model.h"

namespace pinion {

// The bound of a step's forward and backward.
struct PhaseBound {
  // The first fetch and the last gradient's copy, which nothing can hide.
  double ends_us = 0;
  // Forward and backward without the ends: the larger of compute and transfers, at the link's
  // duplex rates.
  double overlapped_us = 0;

  double total_us() const { return ends_us + overlapped_us; }
};

struct ComputeTimes {
  double forward_us = 0;
  double backward_us = 0;
};

// Bounds for `layers` layers of `layer_bytes`, of which `window_layers` fit on the device.
//
// A training step begins with no layer on the device, since the optimizer changed all. When
// backward begins the window is full. Backward does not need the first layer's weights.
//
// Inference hides all fetches behind compute. With room for w of n layers every eviction order
// fetches at least n * (n - w) / (n - 1) layers (Belady). One layer is always in flight on a busy
// link, so w is the window less one.
PhaseBound TrainingBound(const LinkModel& link, uint64_t layer_bytes, int layers, int window_layers,
                         const ComputeTimes& compute);
// The same if `saved_bytes` of activations can be offloaded within the same memory. Backward
// fetches the bytes of both beyond that memory. Forward offloads the activations that do not fit
// beside the layer in use.
PhaseBound SharedBound(const LinkModel& link, uint64_t layer_bytes, int layers,
                       uint64_t saved_bytes, uint64_t memory_bytes, const ComputeTimes& compute);
PhaseBound InferenceBound(const LinkModel& link, uint64_t layer_bytes, int layers,
                          int window_layers, double compute_us);

}  // namespace pinion

#endif  // PINION_BENCH_WEIGHTS_PHASE_BOUND_H_
