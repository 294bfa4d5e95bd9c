// Implements Captum's LayerGradientShap: expected gradients, a Monte Carlo estimate of Shapley
// values (Lundberg and Lee, 2017; Erion et al., 2019). Each sample of an example draws a baseline,
// a point between baseline and input, and noise on the input. The result averages the layer's
// gradient at that point times the layer's change from baseline to input.
//
//   pinion::ShapOptions options;
//   options.seed = 7;
//   const auto shap = pinion::LayerGradientShap(*session, forward, {"conv4"}, {x}, {baselines},
//                                               Target::Class(3), options);
//
// Rows, passes and their memory budget work as in path_methods.h, with samples in place of steps.
//
// Thread safety, errors: as in path_methods.h.

#ifndef PINION_HOOKS_ATTRIBUTION_GRADIENT_SHAP_H_
#define PINION_HOOKS_ATTRIBUTION_GRADIENT_SHAP_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/layer_methods.h"
#include "pinion/hooks/attribution/layer_options.h"
#include "pinion/hooks/attribution/target.h"

namespace pinion {

struct ShapOptions {
  int64_t n_samples = 5;
  double stdev = 0;   // of the noise on each sample of the inputs
  uint64_t seed = 0;  // the same draws on every device and with every budget
  std::vector<at::Tensor> additional_inputs = {};  // as in PathOptions
  bool multiply_by_inputs = true;                  // false: gradients alone
  uint64_t device_budget_bytes = 0;                // as in PathOptions
  LayerOptions layers = {};                        // the method sets `activations`
};

// Random draws, one row per sample and example: all examples of the first sample come first.
struct ShapDraws {
  at::Tensor baselines;           // indices into the distribution, int64
  at::Tensor coefficients;        // 0 at the baseline, 1 at the input, float64
  std::vector<at::Tensor> noise;  // one per input; empty: no noise
};
// Throws c10::Error unless all inputs have equally many examples.
ShapDraws DrawShap(const std::vector<at::Tensor>& inputs, int64_t baselines,
                   const ShapOptions& options);

// Returns one attribution per layer. `baselines` has one distribution per input; all have equally
// many examples, and one drawn index selects from all of them.
std::vector<LayerAttribution> LayerGradientShap(AttributionSession& session,
                                                const AttributedForward& forward,
                                                const std::vector<std::string>& layers,
                                                const std::vector<at::Tensor>& inputs,
                                                const std::vector<at::Tensor>& baselines,
                                                const Target& target,
                                                const ShapOptions& options = {});
// Does the same with the caller's draws, which are on the CPU.
std::vector<LayerAttribution> LayerGradientShap(AttributionSession& session,
                                                const AttributedForward& forward,
                                                const std::vector<std::string>& layers,
                                                const std::vector<at::Tensor>& inputs,
                                                const std::vector<at::Tensor>& baselines,
                                                const Target& target, const ShapOptions& options,
                                                const ShapDraws& draws);

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_GRADIENT_SHAP_H_
