#include "pinion/hooks/attribution/quadrature.h"

#include <ATen/ops/linspace.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <cstddef>
#include <numbers>

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
  const int64_t count = n_steps + overlap;
  PathPoints points = is_gauss ? GaussLegendre(count) : Riemann(quadrature, count);
  for (double& weight : points.weights) weight = static_cast<float>(weight);
  return points;
}

}  // namespace pinion
