// What one device's link to the host can do, measured in a few hundred milliseconds or less.
//
//   PINION_ASSIGN_OR_RETURN(const LinkCalibration link, CalibrateLink(*device, *allocator));
//   const double needed_us = link.d2h.CopyUs(tensor_bytes);
//
// Links are asymmetric, shared by both directions, and differ between hosts that look alike, so
// whoever plans transfers plans from these numbers instead of from a data sheet.
//
// What is measured is the link alone: the host's cost of submitting is not in it (link_meter.h).
// Copies of other programs, or of this one, that run meanwhile make the result worse, not wrong.
//
// Errors: ResourceExhausted when not even 1 MiB can be had on both sides; FailedPrecondition when
// submission is too slow for this link to be measured (link_meter.h), or the times are noise;
// DeadlineExceeded when a copy takes longer than a minute; the device's own errors.
// Thread safety: the values are plain data. CalibrateLink may run beside other users of the device.

#ifndef PINION_ENGINE_LINK_CALIBRATION_H_
#define PINION_ENGINE_LINK_CALIBRATION_H_

#include <string>

#include "absl/status/statusor.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/device/device.h"
#include "pinion/engine/link_curve.h"

namespace pinion {

struct LinkCalibration {
  // Each direction with the other one idle.
  LinkCurve h2d;
  LinkCurve d2h;
  // Each direction while the other one is kept busy. Never above the curve's own.
  double h2d_duplex_gb_per_s = 0;
  double d2h_duplex_gb_per_s = 0;
  bool modelled = false;  // of an emulated device: nothing of it was measured on hardware

  const LinkCurve& curve(CopyDirection direction) const {
    return direction == CopyDirection::kHostToDevice ? h2d : d2h;
  }
  double duplex_gb_per_s(CopyDirection direction) const {
    return direction == CopyDirection::kHostToDevice ? h2d_duplex_gb_per_s : d2h_duplex_gb_per_s;
  }

  // One line per direction.
  std::string ToString() const;
};

// Borrows 16 MiB of the device and 16 MiB from `allocator` for as long as it runs, less where that
// much cannot be had, and gives everything back whatever happens. What can still be written by a
// device that does not answer any more leaks instead, which is logged.
absl::StatusOr<LinkCalibration> CalibrateLink(Device& device, PinnedAllocator& allocator);

}  // namespace pinion

#endif  // PINION_ENGINE_LINK_CALIBRATION_H_
