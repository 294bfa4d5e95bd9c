// What one device's link to the host can do: what transfers are planned from.
//
//   const LinkCalibration link = ...;                       // engine/link/calibrate_link.h
//   const double needed_us = link.d2h.CopyUs(tensor_bytes);
//
// Links are asymmetric, shared by both directions, and differ between hosts that look alike, so
// whoever plans transfers plans from numbers that were measured instead of from a data sheet.
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
  // Each direction with the other one idle.
  LinkCurve h2d;
  LinkCurve d2h;
  // Each direction while the other one is kept busy. Never above the curve's own.
  double h2d_duplex_gb_per_s = 0;
  double d2h_duplex_gb_per_s = 0;
  bool modelled = false;  // of an emulated device: nothing of it was measured on hardware

  // InvalidArgument that names the field and its value, and what to do, unless all costs are finite
  // and each direction has a bandwidth. Duplex bandwidths may be missing (0).
  absl::Status Validate() const;

  // One line per direction.
  std::string ToString() const;
};

// For a link that is not known: 20 GB/s in either direction, 15 in both at once; 3 us for a copy,
// 1 us for each further piece of a batch.
LinkCalibration AssumedLink();

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

#endif  // PINION_ENGINE_LINK_LINK_CALIBRATION_H_
