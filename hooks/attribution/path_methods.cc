#include "pinion/hooks/attribution/path_methods.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/linspace.h>
#include <c10/core/GradMode.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <cstddef>
#include <functional>
#include <map>
#include <numbers>
#include <utility>

#include "absl/types/span.h"
#include "pinion/hooks/attribution/layer_pass.h"
#include "pinion/hooks/attribution/passes.h"
#include "pinion/hooks/attribution/tap.h"

namespace pinion {
namespace {

// Finds the roots of the Legendre polynomial of degree n by Newton's method from Tricomi's guess,
// with weights 2 / ((1 - z^2) P'(z)^2) (Abramowitz and Stegun, 25.4.29), scaled to [0, 1].
PathPoints GaussLegendre(int64_t n) {
  PathPoints points;
  for (int64_t i = n; i > 0; --i) {
    const auto degree = static_cast<double>(n);
    double z = std::cos(std::numbers::pi * (static_cast<double>(i) - 0.25) / (degree + 0.5));
    double slope = 0;
    for (double step = 1; std::abs(step) > 1e-15;) {
      double value = 1, before = 0;
      for (int64_t k = 1; k <= n; ++k) {
        const auto d = static_cast<double>(k);
        const double next = ((2 * d - 1) * z * value - (d - 1) * before) / d;
        before = value;
        value = next;
      }
      slope = degree * (z * value - before) / (z * z - 1);
      step = value / slope;
      z -= step;
    }
    points.alphas.push_back((1 + z) / 2);
    points.weights.push_back(1 / ((1 - z * z) * slope * slope));
  }
  return points;
}

PathPoints Riemann(Quadrature quadrature, int64_t n) {
  const double step = 1 / static_cast<double>(n);
  double begin = 0, end = 1;
  if (quadrature == Quadrature::kRiemannLeft) end = 1 - step;
  if (quadrature == Quadrature::kRiemannRight) begin = step;
  if (quadrature == Quadrature::kRiemannMiddle) {
    begin = step / 2;
    end = 1 - step / 2;
  }
  const at::Tensor alphas = at::linspace(begin, end, n, at::kFloat);
  PathPoints points;
  for (int64_t i = 0; i < n; ++i) points.alphas.push_back(alphas.const_data_ptr<float>()[i]);
  points.weights.assign(static_cast<size_t>(n), step);
  if (quadrature == Quadrature::kRiemannTrapezoid) {
    points.weights.front() /= 2;
    points.weights.back() /= 2;
  }
  return points;
}

// The points of a path, and the passes over examples and points.
struct PathRun {
  // `overlap` is the number of steps that consecutive passes share.
  PathRun(AttributionSession& session, const AttributedForward& forward,
          const std::vector<std::string>& layers, const std::vector<at::Tensor>& inputs,
          const Target& target, const PathOptions& options, int64_t overlap = 0)
      : path(inputs, options.baselines, options.additional_inputs),
        points(PointsOf(options.quadrature, options.n_steps, overlap)),
        passes(session, forward, layers, target,
               {path.examples(), static_cast<int64_t>(points.alphas.size()), overlap},
               options.device_budget_bytes, options.layers) {}

  absl::Span<const double> Alphas(const PassRows& rows) const { return Of(points.alphas, rows); }
  absl::Span<const double> Weights(const PassRows& rows) const { return Of(points.weights, rows); }
  std::vector<at::Tensor> Between(const PassRows& rows) const {
    return path.Between(rows, points.alphas);
  }

  const PathInputs path;
  const PathPoints points;
  PassRun passes;

 private:
  static absl::Span<const double> Of(const std::vector<double>& all, const PassRows& rows) {
    return absl::MakeConstSpan(all).subspan(static_cast<size_t>(rows.first_step),
                                            static_cast<size_t>(rows.steps));
  }
};

// A layer's value at the baselines, and the difference from there to the inputs; on the device.
struct LayerPath {
  at::Tensor baseline;
  at::Tensor difference;
};
using LayerPaths = std::vector<std::vector<LayerPath>>;

LayerPaths PathsBetween(std::vector<LayerResult> at_baselines, std::vector<LayerResult> at_inputs,
                        const std::vector<std::string>& layers) {
  LayerPaths paths(layers.size());
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    TORCH_CHECK(at_inputs[layer].tensors.size() == at_baselines[layer].tensors.size(), "layer \"",
                layers[layer], "\" has ", at_inputs[layer].tensors.size(),
                " tensors at the inputs and ", at_baselines[layer].tensors.size(),
                " at the baselines: between those is no path");
    for (size_t i = 0; i < at_inputs[layer].tensors.size(); ++i) {
      at::Tensor baseline = at_baselines[layer].tensors[i].activation;
      at::Tensor difference = at_inputs[layer].tensors[i].activation - baseline;
      paths[layer].push_back({std::move(baseline), std::move(difference)});
    }
  }
  return paths;
}

}  // namespace

PathPoints PointsOf(Quadrature quadrature, int64_t n_steps, int64_t overlap) {
  const bool is_gauss = quadrature == Quadrature::kGaussLegendre;
  // Both ends of a Riemann sum are points. The overlap adds points too.
  const int64_t least = is_gauss || overlap > 0 ? 1 : 2;
  // Between 0 and 1, float32 tells no more points apart.
  const int64_t most = is_gauss ? 10'000 : int64_t{1} << 24;
  TORCH_CHECK(n_steps >= least, "a path of ", n_steps, " steps: n_steps is at least ", least);
  TORCH_CHECK(n_steps <= most, "a path of ", n_steps, " steps: n_steps is at most ", most,
              is_gauss ? ", or 2^24 with Quadrature::kRiemannMiddle" : "");
  TORCH_CHECK(0 <= overlap && overlap <= n_steps, "a path of ", n_steps,
              " steps and an overlap of ", overlap, ": overlap is at least 0 and at most n_steps");
  const int64_t count = n_steps + overlap;
  PathPoints points = is_gauss ? GaussLegendre(count) : Riemann(quadrature, count);
  for (double& weight : points.weights) weight = static_cast<float>(weight);
  return points;
}

std::vector<at::Tensor> IntegratedGradients(AttributionSession& session,
                                            const AttributedForward& forward,
                                            const std::vector<at::Tensor>& inputs,
                                            const Target& target, const PathOptions& options) {
  static constexpr char kInputs[] = "pinion.inputs";
  const AttributedForward tapped = [&](const std::vector<at::Tensor>& given) {
    const auto end = given.begin() + static_cast<std::ptrdiff_t>(inputs.size());
    std::vector<at::Tensor> all = Tap(kInputs, std::vector<at::Tensor>(given.begin(), end));
    all.insert(all.end(), end, given.end());
    return OutputOf(forward, all);
  };
  PathRun run(session, tapped, {kInputs}, inputs, target, options);
  std::vector<LayerAttribution> layers = run.passes.Sum([&](const PassRows& rows) {
    LayerCallbacks callbacks;
    callbacks.output_function = [&](LayerPart part, const at::Tensor& gradient) {
      const at::Tensor sum = SumOverSteps(gradient, rows, run.Weights(rows));
      if (!options.multiply_by_inputs) return sum;
      return sum * run.path.Difference(rows, part.tensor).to(sum.device());
    };
    return run.passes.Gradients(rows, run.Between(rows), callbacks);
  });
  return std::move(layers.front().tensors);
}

std::vector<LayerAttribution> LayerIntegratedGradients(AttributionSession& session,
                                                       const AttributedForward& forward,
                                                       const std::vector<std::string>& layers,
                                                       const std::vector<at::Tensor>& inputs,
                                                       const Target& target,
                                                       const PathOptions& options) {
  PathRun run(session, forward, layers, inputs, target, options);
  LayerPaths paths;
  return run.passes.Sum([&](const PassRows& rows) {
    if (rows.first_step == 0) {
      const PassRows one = {rows.first_example, rows.examples, 0, 1};
      paths.clear();
      const auto values = [&run](const std::vector<at::Tensor>& given) {
        return run.passes.Values(given, /*keep_on_device=*/true).Wait();
      };
      paths =
          PathsBetween(values(run.path.AtBaselines(one)), values(run.path.AtInputs(one)), layers);
    }
    LayerCallbacks callbacks;
    // All calls of a layer share one tensor, so that its gradient covers all of them.
    std::map<std::pair<size_t, size_t>, at::Tensor> points_of;
    callbacks.replace = [&](LayerPart part, const at::Tensor& value) {
      const LayerPath& path = paths[part.layer][part.tensor];
      at::Tensor& points = points_of[{part.layer, part.tensor}];
      if (!points.defined()) {
        const at::NoGradGuard no_grad;
        points = PointsBetween(path.baseline, path.difference, run.Alphas(rows));
      }
      TORCH_CHECK(points.sizes() == value.sizes() && points.device() == value.device(), "layer \"",
                  layers[part.layer], "\" is of ", value.sizes(), " on ", value.device(),
                  " in a pass of ", rows.steps, " steps, and its path is of ", points.sizes(),
                  " on ", points.device(),
                  ": attribute to a layer of one device whose first dimension counts the rows");
      return points;
    };
    callbacks.output_function = [&](LayerPart part, const at::Tensor& gradient) {
      const at::Tensor sum = SumOverSteps(gradient, rows, run.Weights(rows));
      if (!options.multiply_by_inputs) return sum;
      return sum * paths[part.layer][part.tensor].difference.to(sum.device());
    };
    return run.passes.Gradients(rows, run.path.AtInputs(rows), callbacks);
  });
}

std::vector<LayerAttribution> InternalInfluence(AttributionSession& session,
                                                const AttributedForward& forward,
                                                const std::vector<std::string>& layers,
                                                const std::vector<at::Tensor>& inputs,
                                                const Target& target, const PathOptions& options) {
  PathRun run(session, forward, layers, inputs, target, options);
  return run.passes.Sum([&](const PassRows& rows) {
    LayerCallbacks callbacks;
    callbacks.output_function = [&](LayerPart, const at::Tensor& gradient) {
      return SumOverSteps(gradient, rows, run.Weights(rows));
    };
    return run.passes.Gradients(rows, run.Between(rows), callbacks);
  });
}

std::vector<LayerAttribution> LayerConductance(AttributionSession& session,
                                               const AttributedForward& forward,
                                               const std::vector<std::string>& layers,
                                               const std::vector<at::Tensor>& inputs,
                                               const Target& target, const PathOptions& options) {
  PathRun run(session, forward, layers, inputs, target, options, /*overlap=*/1);
  return run.passes.Sum([&](const PassRows& rows) {
    LayerCallbacks callbacks;
    callbacks.on_arrival = [&run, rows](LayerPart part, LayerTensor& tensor) {
      const auto add = [](at::Tensor& sum, const std::vector<at::Tensor>& blocks) {
        const at::Tensor &values = blocks[0], &gradients = blocks[1];
        for (int64_t step = 0; step + 1 < values.size(0); ++step) {
          const auto at_step = [&](const at::Tensor& all, int64_t which) {
            return all.select(0, which).to(sum.scalar_type());
          };
          sum.addcmul_(at_step(gradients, step), at_step(values, step + 1) - at_step(values, step));
        }
      };
      run.passes.Add(part, rows,
                     SumTermsOverSteps(
                         {std::exchange(tensor.activation, {}), std::exchange(tensor.gradient, {})},
                         rows, add));
    };
    return run.passes.Gradients(rows, run.Between(rows), callbacks, /*with_values=*/true);
  });
}

at::Tensor ConvergenceDelta(AttributionSession& session, const AttributedForward& forward,
                            const std::vector<at::Tensor>& attributions,
                            const std::vector<at::Tensor>& inputs, const Target& target,
                            const PathOptions& options) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK(!attributions.empty(),
              "a convergence delta of no attributions: give those of all inputs, or of one layer");
  for (size_t i = 0; i < attributions.size(); ++i) {
    TORCH_CHECK(attributions[i].defined(), "attribution ", i,
                " is undefined: a convergence delta sums those of all inputs, or of one layer");
  }
  const PathInputs path(inputs, options.baselines, options.additional_inputs);
  PassRun run(session, forward, /*layers=*/{}, target, {path.examples(), /*steps=*/1},
              options.device_budget_bytes, /*options=*/{});
  std::vector<at::Tensor> parts;
  run.Sum([&](const PassRows& rows) {
    const Target of_rows = target.OfRows(rows.first_example, rows.examples, 1);
    at::Tensor delta = (of_rows.Select(OutputOf(forward, path.AtBaselines(rows))) -
                        of_rows.Select(OutputOf(forward, path.AtInputs(rows))))
                           .cpu();
    TORCH_CHECK(delta.size(0) == rows.examples, "the output has ", delta.size(0), " numbers for ",
                rows.examples, " examples: a convergence delta needs one each");
    for (const at::Tensor& attribution : attributions) {
      TORCH_CHECK(attribution.dim() > 0 && attribution.size(0) == path.examples(),
                  "an attribution of ", attribution.sizes(), " for ", path.examples(),
                  " examples: its first dimension counts them");
      delta += attribution.narrow(0, rows.first_example, rows.examples)
                   .reshape({rows.examples, -1})
                   .sum(1)
                   .cpu()
                   .to(delta.scalar_type());
    }
    parts.push_back(std::move(delta));
    return QueuedPass();
  });
  return at::cat(parts);
}

}  // namespace pinion
