// Measures what one device's link to the host can do, in a few hundred milliseconds or less.
//
//   PINION_ASSIGN_OR_RETURN(const LinkCalibration link, CalibrateLink(*device, *allocator));
//   const double needed_us = link.d2h.CopyUs(tensor_bytes);
//
// What is measured is the link alone: the host's cost of submitting is not in it (link_meter.h).
// Copies of other programs, or of this one, that run meanwhile make the result worse, not wrong.
//
// Errors: ResourceExhausted when not even 1 MiB can be had on both sides; FailedPrecondition when
// submission is too slow for this link to be measured (link_meter.h), or the times are noise;
// DeadlineExceeded when a copy takes longer than a minute; the device's own errors.
// Thread safety: it may run beside other users of the device.

#ifndef PINION_ENGINE_LINK_CALIBRATE_LINK_H_
#define PINION_ENGINE_LINK_CALIBRATE_LINK_H_

#include "absl/status/statusor.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/device/device.h"
#include "pinion/engine/link/link_calibration.h"
#include "pinion/engine/link/link_curve.h"

namespace pinion {

// Borrows 16 MiB of the device and 16 MiB from `allocator` for as long as it runs, less where that
// much cannot be had, and gives everything back whatever happens. What can still be written by a
// device that does not answer any more leaks instead, which is logged.
absl::StatusOr<LinkCalibration> CalibrateLink(Device& device, PinnedAllocator& allocator);

// What it says of one direction. (A plan's data knows no device, and so no CopyDirection.)
inline const LinkCurve& CurveOf(const LinkCalibration& link, CopyDirection direction) {
  return direction == CopyDirection::kHostToDevice ? link.h2d : link.d2h;
}
inline double DuplexGbPerSOf(const LinkCalibration& link, CopyDirection direction) {
  return direction == CopyDirection::kHostToDevice ? link.h2d_duplex_gb_per_s
                                                   : link.d2h_duplex_gb_per_s;
}

}  // namespace pinion

#endif  // PINION_ENGINE_LINK_CALIBRATE_LINK_H_
