#include "pinion/engine/plan/link_rates.h"

#include <algorithm>
#include <cmath>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/status_macros.h"

namespace pinion {
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
