// Measured performance of one device's link to the host. Transfers are planned from it.
//
//   const LinkCalibration link = ...;                       // engine/link/calibrate_link.h
//   const double needed_us = link.d2h.CopyUs(tensor_bytes);
//
// Links are asymmetric, both directions share them, and they differ between similar hosts. So plans
// use measurements, not data sheets.
//
// Plain data and pure functions.

#ifndef PINION_ENGINE_LINK_LINK_CALIBRATION_H_
#define PINION_ENGINE_LINK_LINK_CALIBRATION_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace pinion {

// Cost of copies on a link, as a line: a fixed cost and a bandwidth.
//
//   copy    fixed_us + bytes / bandwidth
//   batch   fixed_us + (pieces - 1) * piece_us + bytes / bandwidth
//
// GB/s are 1e9 bytes per second, as nvbandwidth prints them.
struct LinkCurve {
  double fixed_us = 0;  // of a copy in a queue of copies
  double piece_us = 0;  // of each further piece of a batch
  double gb_per_s = 0;  // of large copies; 0: not measured

  // The size at which a copy reaches half of the bandwidth.
  double HalfPerformanceBytes() const { return fixed_us * gb_per_s * 1e3; }
  // Infinite if the bandwidth was not measured.
  double CopyUs(uint64_t size_bytes) const {
    return fixed_us + static_cast<double>(size_bytes) / (gb_per_s * 1e3);
  }
  // The bandwidth that a copy of this size reaches.
  double CopyGbPerS(uint64_t size_bytes) const {
    return static_cast<double>(size_bytes) / (CopyUs(size_bytes) * 1e3);
  }
};

// One copy of `size_bytes` took `us`.
struct CopyTime {
  uint64_t size_bytes = 0;
  double us = 0;
};

// Fits the line with the least sum of squared *relative* errors, so that small copies count as much
// as large ones. The fixed cost is never negative; piece_us stays 0. InvalidArgument if there are
// fewer than two sizes, if a time is not positive, or if times shrink with the size.
absl::StatusOr<LinkCurve> FitLinkCurve(absl::Span<const CopyTime> times);

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
// bytes, or one after the other. Bytes are finite and at least 0; `rates` are those of RatesOf.
double LinkUs(double out_bytes, double in_bytes, const LinkRates& rates);

// InvalidArgument names a bandwidth that was not measured, or an invalid cost.
absl::StatusOr<LinkRates> RatesOf(const LinkCalibration& link);

}  // namespace pinion

#endif  // PINION_ENGINE_LINK_LINK_CALIBRATION_H_
