#include "pinion/engine/plan/link_calibration.h"

#include "absl/strings/str_format.h"

namespace pinion {

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
