#include "pinion/engine/plan/link_calibration.h"

#include "absl/strings/str_format.h"

namespace pinion {

std::string LinkCalibration::ToString() const {
  std::string text;
  for (const CopyDirection direction :
       {CopyDirection::kHostToDevice, CopyDirection::kDeviceToHost}) {
    absl::StrAppendFormat(&text,
                          "%s%s %.4g GB/s alone, %.4g GB/s with both directions busy, %.3g us "
                          "per copy, %.3g us per further piece%s",
                          text.empty() ? "" : "\n", CopyDirectionName(direction),
                          curve(direction).gb_per_s, duplex_gb_per_s(direction),
                          curve(direction).fixed_us, curve(direction).piece_us,
                          modelled ? " (modelled)" : "");
  }
  return text;
}

}  // namespace pinion
