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

// InvalidArgument names the bandwidth that was not measured.
absl::StatusOr<LinkRates> RatesOf(const LinkCalibration& link);

}  // namespace pinion

#endif  // PINION_ENGINE_PLAN_LINK_RATES_H_
