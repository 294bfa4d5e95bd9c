// Captum's LayerGradientShap: expected gradients, a Monte Carlo estimate of Shapley values
// (Lundberg and Lee, 2017; Erion et al., 2019). Of each example some samples are drawn: a baseline
// out of a distribution, a point on the way from there to the input, and noise on the input. The
// layer's gradient at that point times the layer's change from baseline to input is averaged.
//
//   pinion::ShapOptions options;
//   options.seed = 7;
//   const auto shap = pinion::LayerGradientShap(*session, forward, {"conv4"}, {x}, {baselines},
//                                               Target::Class(3), options);
//
// Rows, passes and their budget are those of path_methods.h, with samples for steps.
//
// Thread safety, errors: as there.

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
  double stdev = 0;   // of the noise that each sample of the inputs is given
  uint64_t seed = 0;  // of all draws: the same on every device, whatever the budget
  std::vector<at::Tensor> additional_inputs = {};  // as in PathOptions
  bool multiply_by_inputs = true;                  // otherwise gradients alone
  uint64_t device_budget_bytes = 0;                // as in PathOptions
  LayerOptions layers = {};                        // `activations` is the method's
};

// What was drawn: of each sample all examples, sample by sample, in the first dimension.
struct ShapDraws {
  at::Tensor baselines;           // which of the distribution's, int64
  at::Tensor coefficients;        // 0 at the baseline, 1 at the input, float64
  std::vector<at::Tensor> noise;  // for each input, or empty: none
};
ShapDraws DrawShap(const std::vector<at::Tensor>& inputs, int64_t baselines,
                   const ShapOptions& options);

// `baselines` has a distribution for each input, all of as many examples, which are drawn together.
std::vector<LayerAttribution> LayerGradientShap(AttributionSession& session,
                                                const AttributedForward& forward,
                                                const std::vector<std::string>& layers,
                                                const std::vector<at::Tensor>& inputs,
                                                const std::vector<at::Tensor>& baselines,
                                                const Target& target,
                                                const ShapOptions& options = {});
// The same with draws of the caller's, on the host.
std::vector<LayerAttribution> LayerGradientShap(AttributionSession& session,
                                                const AttributedForward& forward,
                                                const std::vector<std::string>& layers,
                                                const std::vector<at::Tensor>& inputs,
                                                const std::vector<at::Tensor>& baselines,
                                                const Target& target, const ShapOptions& options,
                                                const ShapDraws& draws);

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_GRADIENT_SHAP_H_
