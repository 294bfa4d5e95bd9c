// What no way to bring weights to the device layer by layer, and gradients back, can beat while it
// keeps the link busy. Of at least two layers.
//
// Pure functions.

#ifndef PINION_BENCH_WEIGHTS_PHASE_BOUND_H_
#define PINION_BENCH_WEIGHTS_PHASE_BOUND_H_

#include <cstdint>

#include "pinion/device/emulated/cost_model.h"

namespace pinion {

// What the phase of a step cannot be shorter than.
struct PhaseBound {
  // Beside all else: the first fetch, and the last gradient's way out.
  double ends_us = 0;
  // Without the ends: each of forward and backward takes at least its compute, and at least the
  // bytes that it has to move, at the link's rates of both directions together.
  double overlapped_us = 0;

  double total_us() const { return ends_us + overlapped_us; }
};

struct ComputeTimes {
  double forward_us = 0;
  double backward_us = 0;
};

// Both for `layers` layers of `layer_bytes` each, of which `window_layers` fit on the device.
//
// A training step begins with no layer on the device, since the optimizer has changed all; at its
// turn as many as the window holds are there; the first layer's weights are not needed backward.
//
// In inference, pass by pass, nothing has to be exposed, and of n layers that w have room for no
// order of drops fetches less than n * (n - w) / (n - 1) (Belady's). A link that never rests has
// room for one layer under way at all times, so w is the window less one.
PhaseBound TrainingBound(const LinkModel& link, uint64_t layer_bytes, int layers, int window_layers,
                         const ComputeTimes& compute);
// The same where `saved_bytes` of activations can leave as well, within so much memory for both.
// What both have beyond that at the turn comes back in backward, whichever of the two it is; what
// the activations alone have beyond it, and the layer in use, has left by then.
PhaseBound SharedBound(const LinkModel& link, uint64_t layer_bytes, int layers,
                       uint64_t saved_bytes, uint64_t memory_bytes, const ComputeTimes& compute);
PhaseBound InferenceBound(const LinkModel& link, uint64_t layer_bytes, int layers,
                          int window_layers, double compute_us);

}  // namespace pinion

#endif  // PINION_BENCH_WEIGHTS_PHASE_BOUND_H_
