// Busy time, stalls and traffic of an emulated device, in virtual time.

#ifndef PINION_DEVICE_EMULATED_TIME_STATS_H_
#define PINION_DEVICE_EMULATED_TIME_STATS_H_

#include <cstdint>

namespace pinion {

// Values since the last reset. Kernels and copies count when they finish, busy time as it passes.
struct TimeStats {
  double compute_busy_ms = 0;
  double h2d_busy_ms = 0;  // with at least one copy of the direction in progress
  double d2h_busy_ms = 0;
  uint64_t h2d_bytes = 0;
  uint64_t d2h_bytes = 0;
  // Cost of offloading for the step, as the sum of two parts:
  //   streams  time in which a stream of the device had a kernel submitted, ran none, and was
  //            blocked by a copy: the entry at its head, or the end of the chain of event waits
  //            that begins there. Each stream counts. A stream without kernels (an engine's copy
  //            stream) never does.
  //   host     time in which the host was blocked by a copy over the device's link, directly or
  //            through such a chain, and the device's compute engine was idle. Time that counts for
  //            a stream of the device, or for the stream that the host waited for, is not repeated.
  // The host blocks in WaitEvent, SynchronizeStream, SynchronizeDevice, a copy of pageable memory,
  // an unpinning, and an allocation that waits for freed memory. So copies that outlast a step
  // count if a SynchronizeDevice at its end waits for them. A host that polls (QueryEvent) is not
  // blocked.
  double stalled_on_copies_ms = 0;
  // Counted by CountHostArithmetic, even while the device was busy.
  double host_arithmetic_ms = 0;
  uint64_t kernels = 0;
  uint64_t copies = 0;
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_TIME_STATS_H_
