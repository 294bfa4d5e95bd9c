// Captum's methods that integrate over a path from baselines to inputs, in passes that fit a budget
// for device memory (docs/users/attribution.md).
//
//   pinion::PathOptions options;
//   options.device_budget_bytes = uint64_t{8} << 30;  // instead of an internal batch size
//   const Target target = Target::Class(3);
//   const auto heat = pinion::IntegratedGradients(*session, forward, {x}, target, options);
//   const auto delta =
//       pinion::ConvergenceDelta(*session, forward, heat, {x}, target, options);
//
// The device sums gradients over the steps of a pass before they are copied to the host; the host
// sums over passes.
//
// The forward function gets several examples and steps as rows of its inputs' first dimension, and
// must treat each row alike and independently.
//
// Thread safety, errors: as for AttributionSession. If the smallest pass exceeds the budget, a
// c10::OutOfMemoryError names the least budget.

#ifndef PINION_HOOKS_ATTRIBUTION_PATH_METHODS_H_
#define PINION_HOOKS_ATTRIBUTION_PATH_METHODS_H_

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "pinion/hooks/attribution/attribution_session.h"
#include "pinion/hooks/attribution/layer_methods.h"
#include "pinion/hooks/attribution/layer_options.h"
#include "pinion/hooks/attribution/target.h"

namespace pinion {

// How an integral along a path, from the baseline at 0 to the input at 1, becomes a weighted sum
// over points. Points and weights equal Captum's (captum/attr/_utils/approximation_methods.py),
// including its rounding of all weights and of Riemann points to float32.
enum class Quadrature {
  kGaussLegendre,
  kRiemannLeft,
  kRiemannMiddle,
  kRiemannRight,
  // Points at both ends and in between. Weights are 1/n, halved at the ends, and add up to 1 - 1/n.
  kRiemannTrapezoid,
};

struct PathPoints {
  std::vector<double> alphas;  // between 0 and 1, ascending
  std::vector<double> weights;
};

// Returns points and weights for `n_steps + overlap` steps.
//
// n_steps: 2 to 2^24. kGaussLegendre: 1 to 10,000, since its time grows as the square.
// overlap: 0 to n_steps.
//
// Other numbers are a c10::Error.
PathPoints PointsOf(Quadrature quadrature, int64_t n_steps, int64_t overlap = 0);

struct PathOptions {
  int64_t n_steps = 50;  // kGaussLegendre: 1 to 10,000; others: up to 2^24
  Quadrature quadrature = Quadrature::kGaussLegendre;
  // Start of the path, one per input: of the input's sizes, with a first dimension of 1, or without
  // dimensions. Empty: zeros.
  std::vector<at::Tensor> baselines = {};
  // Passed to forward after the inputs, not attributed to. Dimension 0 counts the examples.
  std::vector<at::Tensor> additional_inputs = {};
  // Whether gradients are multiplied by the input's or the layer's change from the baseline.
  // InternalInfluence never multiplies, LayerConductance always does.
  bool multiply_by_inputs = true;
  // Bound in bytes on all that LibTorch's allocator has given out on each device; passes are as
  // large as it allows. 0: one pass. Not with LayerOptions::keep_on_device, which needs memory
  // there.
  uint64_t device_budget_bytes = 0;
  LayerOptions layers = {};  // the method sets `activations`
};

// Returns one attribution per input. All inputs must be floating-point tensors, and `forward` must
// use the tensors that it is given.
std::vector<at::Tensor> IntegratedGradients(AttributionSession& session,
                                            const AttributedForward& forward,
                                            const std::vector<at::Tensor>& inputs,
                                            const Target& target, const PathOptions& options = {});

// Integrates along the path of the layers' values, which replace the values that the model
// computes. No layer may depend on another one of the list. Inputs may be integers. Each layer must
// be on one device; it holds the values at both ends for a pass's examples.
std::vector<LayerAttribution> LayerIntegratedGradients(AttributionSession& session,
                                                       const AttributedForward& forward,
                                                       const std::vector<std::string>& layers,
                                                       const std::vector<at::Tensor>& inputs,
                                                       const Target& target,
                                                       const PathOptions& options = {});

// Returns the layers' gradients, integrated along the inputs' path.
std::vector<LayerAttribution> InternalInfluence(AttributionSession& session,
                                                const AttributedForward& forward,
                                                const std::vector<std::string>& layers,
                                                const std::vector<at::Tensor>& inputs,
                                                const Target& target,
                                                const PathOptions& options = {});

// Returns the layers' gradients times the layers' changes from step to step of the inputs' path.
std::vector<LayerAttribution> LayerConductance(AttributionSession& session,
                                               const AttributedForward& forward,
                                               const std::vector<std::string>& layers,
                                               const std::vector<at::Tensor>& inputs,
                                               const Target& target,
                                               const PathOptions& options = {});

// Returns per example, on the host, the sum of `attributions` (of all inputs or of one layer) minus
// the change of the target's output from baseline to input.
at::Tensor ConvergenceDelta(AttributionSession& session, const AttributedForward& forward,
                            const std::vector<at::Tensor>& attributions,
                            const std::vector<at::Tensor>& inputs, const Target& target,
                            const PathOptions& options = {});

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_PATH_METHODS_H_
