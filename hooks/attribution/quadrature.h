// Turns an integral along a path, from the baseline at 0 to the input at 1, into a weighted sum
// over points. Points and weights equal Captum's (captum/attr/_utils/approximation_methods.py),
// including its rounding of all weights and of Riemann points to float32.
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
  // Points at both ends and in between. Weights are 1/n, halved at the ends, and add up to 1 - 1/n.
  kRiemannTrapezoid,
};

struct PathPoints {
  std::vector<double> alphas;  // between 0 and 1, ascending
  std::vector<double> weights;
};

// Returns points and weights for `n_steps + overlap` steps. c10::Error for fewer than 2 steps
// (kGaussLegendre: 1), and for n_steps above 2^24 (kGaussLegendre, whose time grows as the square:
// 10,000).
PathPoints PointsOf(Quadrature quadrature, int64_t n_steps, int64_t overlap = 0);

}  // namespace pinion

#endif  // PINION_HOOKS_ATTRIBUTION_QUADRATURE_H_
