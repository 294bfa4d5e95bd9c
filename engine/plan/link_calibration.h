// What one device's link to the host can do: what transfers are planned from.
//
//   const LinkCalibration link = ...;                       // engine/link/calibrate_link.h
//   const double needed_us = link.d2h.CopyUs(tensor_bytes);
//
// Links are asymmetric, shared by both directions, and differ between hosts that look alike, so
// whoever plans transfers plans from numbers that were measured instead of from a data sheet.
//
// Plain data.

#ifndef PINION_ENGINE_PLAN_LINK_CALIBRATION_H_
#define PINION_ENGINE_PLAN_LINK_CALIBRATION_H_

#include <string>

#include "absl/status/status.h"
#include "pinion/engine/plan/link_curve.h"

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

}  // namespace pinion

#endif  // PINION_ENGINE_PLAN_LINK_CALIBRATION_H_
