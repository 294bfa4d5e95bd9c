#include "pinion/engine/link/link_calibration.h"

#include <algorithm>
#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/status_macros.h"

namespace pinion {

absl::StatusOr<LinkCurve> FitLinkCurve(absl::Span<const CopyTime> times) {
  // Weighted least squares of us = fixed + slope * bytes with the weight 1 / us^2.
  double w = 0, wx = 0, wy = 0, wxx = 0, wxy = 0;
  for (const CopyTime& time : times) {
    if (!(time.us > 0 && std::isfinite(time.us)) || time.size_bytes == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("a copy of ", time.size_bytes, " bytes cannot have taken ", time.us,
                       " us: give a size and a finite time that are positive"));
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
        absl::StrCat("larger copies took no longer than small ones: the ", times.size(),
                     " times are noise; measure larger copies, or each several times"));
  }
  LinkCurve curve;
  curve.fixed_us = fixed_us;
  curve.gb_per_s = 1e-3 / slope;
  return curve;
}

absl::Status LinkCalibration::Validate() const {
  const struct {
    const char* field;
    double value;
    bool may_be_zero;
  } fields[] = {
      {"h2d.fixed_us", h2d.fixed_us, true},
      {"h2d.piece_us", h2d.piece_us, true},
      {"h2d.gb_per_s", h2d.gb_per_s, false},
      {"d2h.fixed_us", d2h.fixed_us, true},
      {"d2h.piece_us", d2h.piece_us, true},
      {"d2h.gb_per_s", d2h.gb_per_s, false},
      {"h2d_duplex_gb_per_s", h2d_duplex_gb_per_s, true},
      {"d2h_duplex_gb_per_s", d2h_duplex_gb_per_s, true},
  };
  for (const auto& [field, value, may_be_zero] : fields) {
    if (std::isfinite(value) && (value > 0 || (may_be_zero && value == 0))) continue;
    return absl::InvalidArgumentError(absl::StrFormat(
        "the link's %s is %g; it must be finite and %s: measure it (CalibrateLink), or use "
        "AssumedLink()",
        field, value, may_be_zero ? "at least 0" : "positive"));
  }
  return absl::OkStatus();
}

std::string LinkCalibration::ToString() const {
  const auto line = [this](const char* direction, const LinkCurve& curve, double duplex_gb_per_s) {
    return absl::StrFormat(
        "%s %.4g GB/s alone, %.4g GB/s with both directions busy, %.3g us per copy, %.3g us per "
        "further piece%s",
        direction, curve.gb_per_s, duplex_gb_per_s, curve.fixed_us, curve.piece_us,
        modelled ? " (modelled)" : "");
  };
  return line("H2D", h2d, h2d_duplex_gb_per_s) + "\n" + line("D2H", d2h, d2h_duplex_gb_per_s);
}

LinkCalibration AssumedLink() {
  LinkCalibration link;
  link.h2d = {.fixed_us = 3, .piece_us = 1, .gb_per_s = 20};
  link.d2h = link.h2d;
  link.h2d_duplex_gb_per_s = 15;
  link.d2h_duplex_gb_per_s = 15;
  return link;
}

namespace {

constexpr double kBytesPerUs = 1e3;  // of 1 GB/s

absl::StatusOr<double> RateOf(const char* name, double gb_per_s) {
  if (gb_per_s > 0 && std::isfinite(gb_per_s)) return gb_per_s * kBytesPerUs;
  return absl::InvalidArgumentError(absl::StrCat("the link's ", name, " is ", gb_per_s,
                                                 " GB/s: measure it (CalibrateLink), or use "
                                                 "AssumedLink()"));
}

}  // namespace

double LinkUs(double out_bytes, double in_bytes, const LinkRates& rates) {
  PINION_CHECK(out_bytes >= 0 && in_bytes >= 0 && std::isfinite(out_bytes + in_bytes))
      << "LinkUs of " << out_bytes << " and " << in_bytes
      << " bytes; both must be finite and at least 0";
  for (const double rate : {rates.out, rates.in, rates.duplex_out, rates.duplex_in}) {
    PINION_CHECK(rate > 0 && std::isfinite(rate))
        << "LinkUs at " << rate << " bytes per us; take the rates from RatesOf";
  }
  const double one_after_the_other_us = out_bytes / rates.out + in_bytes / rates.in;
  const double both_us = std::min(out_bytes / rates.duplex_out, in_bytes / rates.duplex_in);
  const double rest_us = (out_bytes - both_us * rates.duplex_out) / rates.out +
                         (in_bytes - both_us * rates.duplex_in) / rates.in;
  return std::min(one_after_the_other_us, both_us + rest_us);
}

absl::StatusOr<LinkRates> RatesOf(const LinkCalibration& link) {
  LinkRates rates;
  PINION_ASSIGN_OR_RETURN(rates.out, RateOf("d2h.gb_per_s", link.d2h.gb_per_s));
  PINION_ASSIGN_OR_RETURN(rates.in, RateOf("h2d.gb_per_s", link.h2d.gb_per_s));
  PINION_ASSIGN_OR_RETURN(rates.duplex_out,
                          RateOf("d2h_duplex_gb_per_s", link.d2h_duplex_gb_per_s));
  PINION_ASSIGN_OR_RETURN(rates.duplex_in, RateOf("h2d_duplex_gb_per_s", link.h2d_duplex_gb_per_s));
  PINION_RETURN_IF_ERROR(link.Validate());  // its costs as well
  return rates;
}

}  // namespace pinion
