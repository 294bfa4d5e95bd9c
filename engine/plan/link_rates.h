// What a link carries, in the units of plans.

#ifndef PINION_ENGINE_PLAN_LINK_RATES_H_
#define PINION_ENGINE_PLAN_LINK_RATES_H_

#include "absl/status/statusor.h"
#include "pinion/engine/plan/link_calibration.h"

namespace pinion {

// Bytes per us.
struct LinkRates {
  double out = 0, in = 0;                // alone
  double duplex_out = 0, duplex_in = 0;  // both at once
};

// What the link takes for so many bytes in each direction, in the best order: both at once until
// one has no more to carry, or one after the other.
double LinkUs(double out_bytes, double in_bytes, const LinkRates& rates);

// InvalidArgument names the bandwidth that was not measured, or an invalid cost.
absl::StatusOr<LinkRates> RatesOf(const LinkCalibration& link);

}  // namespace pinion

#endif  // PINION_ENGINE_PLAN_LINK_RATES_H_
