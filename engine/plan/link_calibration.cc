#include "pinion/engine/plan/link_calibration.h"

#include <cmath>

#include "absl/strings/str_format.h"

namespace pinion {

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

}  // namespace pinion
