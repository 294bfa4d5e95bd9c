// How an integral over a path, from a baseline at 0 to an input at 1, becomes a sum over points:
// those of Captum (captum/attr/_utils/approximation_methods.py), the roundings to float32 included
// that it makes, of the points of Riemann's sums and of all weights.
//
// Plain data and a pure function.

#ifndef PINION_HOOKS_ATTRIBUTION_QUADRATURE_H_
#define PINION_HOOKS_ATTRIBUTION_QUADRATURE_H_

#include <cstdint>
#include <vector>

namespace pinion {

enum class Quadrature {
  kGaussLegendre,
  kRiemannLeft,
  kRiemannMiddle,
  kRiemannRight,
  // At both ends and in between, with weights of 1/n, halved at the ends: they add up to 1 - 1/n.
  kRiemannTrapezoid,
};

struct PathPoints {
  std::vector<double> alphas;  // between 0 and 1, rising
  std::vector<double> weights;
};

// c10::Error unless there are at least 2 steps; 1 is enough for kGaussLegendre.
PathPoints PointsOf(Quadrature quadrature, int64_t n_steps);

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_QUADRATURE_H_
