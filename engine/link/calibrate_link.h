// Measures the bandwidth and fixed costs of a device's link to the host, in a few hundred
// milliseconds or less.
//
//   PINION_ASSIGN_OR_RETURN(const LinkCalibration link, CalibrateLink(*device, *allocator));
//   const double needed_us = link.d2h.CopyUs(tensor_bytes);
//
// The result excludes the host's cost of submitting (link_meter.h). Other copies that run meanwhile
// make the result pessimistic, not invalid.
//
// Errors: ResourceExhausted if less than 1 MiB is available on either side. FailedPrecondition if
// submission is too slow for this link (link_meter.h), or if the times are noise. DeadlineExceeded
// if a copy takes longer than a minute. The device's own errors.
// Thread safety: may run beside other users of the device.

#ifndef PINION_ENGINE_LINK_CALIBRATE_LINK_H_
#define PINION_ENGINE_LINK_CALIBRATE_LINK_H_

#include "absl/status/statusor.h"
#include "pinion/allocator/pinned_allocator.h"
#include "pinion/device/device.h"
#include "pinion/engine/link/link_calibration.h"

namespace pinion {

// Borrows up to 16 MiB of the device and as much from `allocator`, and always returns them.
// Exception: memory that an unresponsive device may still write is leaked and logged.
absl::StatusOr<LinkCalibration> CalibrateLink(Device& device, PinnedAllocator& allocator);

// Return one direction's values. LinkCalibration itself knows no Device, and so no CopyDirection.
inline const LinkCurve& CurveOf(const LinkCalibration& link, CopyDirection direction) {
  return direction == CopyDirection::kHostToDevice ? link.h2d : link.d2h;
}
inline double DuplexGbPerSOf(const LinkCalibration& link, CopyDirection direction) {
  return direction == CopyDirection::kHostToDevice ? link.h2d_duplex_gb_per_s
                                                   : link.d2h_duplex_gb_per_s;
}

}  // namespace pinion

#endif  // PINION_ENGINE_LINK_CALIBRATE_LINK_H_
