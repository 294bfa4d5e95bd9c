// Virtual time and traffic of an emulated device, as a value.

#ifndef PINION_DEVICE_EMULATED_TIME_STATS_H_
#define PINION_DEVICE_EMULATED_TIME_STATS_H_

#include <cstdint>

namespace pinion {

// Virtual time and traffic of one device since the last reset. Work counts when it is done, busy
// time as it passes.
struct TimeStats {
  double compute_busy_ms = 0;
  double h2d_busy_ms = 0;  // at least one copy of the direction was in progress
  double d2h_busy_ms = 0;
  uint64_t h2d_bytes = 0;
  uint64_t d2h_bytes = 0;
  // What offload costs the step, the sum of two things:
  //   streams  time in which a stream of the device had a kernel submitted, was not running one,
  //            and was held up by a copy: one at its own head, or the one at the end of the chain
  //            of event waits that begins at its head. Each stream counts. A stream without kernels
  //            (an engine's copy stream) never does.
  //   host     time in which the host was blocked, what it waited for was held up (in that sense)
  //            by a copy over the device's link, and the device's compute engine was idle. Time
  //            that counts for a stream of the device, or for the stream that the host waited for,
  //            does not count again.
  // The host blocks in WaitEvent, SynchronizeStream, SynchronizeDevice, a copy of pageable memory,
  // an unpinning, and an allocation that waits for freed memory. So the copies that a step leaves
  // behind count when a SynchronizeDevice at its end has to wait for them. A host that polls
  // (QueryEvent) is not blocked.
  double stalled_on_copies_ms = 0;
  // Arithmetic of the host (device/host_arithmetic.h) that ended with a call of this device. Other
  // work of the device may have gone on meanwhile.
  double host_arithmetic_ms = 0;
  uint64_t kernels = 0;
  uint64_t copies = 0;
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_TIME_STATS_H_
