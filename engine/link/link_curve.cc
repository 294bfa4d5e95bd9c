#include "pinion/engine/link/link_curve.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace pinion {

absl::StatusOr<LinkCurve> FitLinkCurve(absl::Span<const CopyTime> times) {
  // Weighted least squares of us = fixed + slope * bytes with the weight 1 / us^2.
  double w = 0, wx = 0, wy = 0, wxx = 0, wxy = 0;
  for (const CopyTime& time : times) {
    if (!(time.us > 0) || time.size_bytes == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("a copy of ", time.size_bytes, " bytes cannot have taken ", time.us, " us"));
    }
    const double x = static_cast<double>(time.size_bytes);
    const double weight = 1 / (time.us * time.us);
    w += weight;
    wx += weight * x;
    wy += weight * time.us;
    wxx += weight * x * x;
    wxy += weight * x * time.us;
  }
  const double determinant = w * wxx - wx * wx;
  // Relative to the first product: rounding leaves a rest of it where all sizes are equal.
  if (!(determinant > 1e-9 * w * wxx)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a link's curve needs copies of two sizes at least; there are ", times.size(),
                     " times, all of one size"));
  }
  const double fixed_us = std::max(0.0, (wxx * wy - wx * wxy) / determinant);
  const double slope = (wxy - fixed_us * wx) / wxx;  // the best one for this fixed cost
  if (!(slope > 0)) {
    return absl::InvalidArgumentError(
        "larger copies took no longer than small ones: the times are noise");
  }
  LinkCurve curve;
  curve.fixed_us = fixed_us;
  curve.gb_per_s = 1e-3 / slope;
  return curve;
}

}  // namespace pinion
