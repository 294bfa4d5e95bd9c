// Measured performance of one device's link to the host. Transfers are planned from it.
//
//   const LinkCalibration link = ...;                       // engine/link/calibrate_link.h
//   const double needed_us = link.d2h.CopyUs(tensor_bytes);
//
// Links are asymmetric, both directions share them, and they differ between similar hosts. So plans
// use measurements, not data sheets.
//
// Plain data.

#ifndef PINION_ENGINE_LINK_LINK_CALIBRATION_H_
#define PINION_ENGINE_LINK_LINK_CALIBRATION_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "pinion/engine/link/link_curve.h"

namespace pinion {

struct LinkCalibration {
  // Each direction while the other one is idle.
  LinkCurve h2d;
  LinkCurve d2h;
  // Each direction while the other one is kept busy. Never above the curve's own.
  double h2d_duplex_gb_per_s = 0;
  double d2h_duplex_gb_per_s = 0;
  bool modelled = false;  // of an emulated device, not measured on hardware

  // InvalidArgument names the field, its value and the remedy. All costs have to be finite, and
  // each direction needs a bandwidth. Duplex bandwidths may be missing (0).
  absl::Status Validate() const;

  // One line per direction.
  std::string ToString() const;
};

// Default for an unknown link: 20 GB/s in each direction, 15 in both at once, 3 us for a copy, and
// 1 us for each further piece of a batch.
LinkCalibration AssumedLink();

// Bandwidths in bytes per us.
struct LinkRates {
  double out = 0, in = 0;                // alone
  double duplex_out = 0, duplex_in = 0;  // both at once
};

// Shortest time for these bytes in each direction: both directions at once until one has no more
// bytes, or one after the other.
double LinkUs(double out_bytes, double in_bytes, const LinkRates& rates);

// InvalidArgument names a bandwidth that was not measured, or an invalid cost.
absl::StatusOr<LinkRates> RatesOf(const LinkCalibration& link);

}  // namespace pinion

#endif  // PINION_ENGINE_LINK_LINK_CALIBRATION_H_
