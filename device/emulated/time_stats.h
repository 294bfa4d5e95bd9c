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
  // What offload costs the step: time in which a stream had a kernel submitted, was not running
  // one, and was held up by a copy: one at its own head, or the one at the end of the chain of
  // event waits that begins at its head. Summed over the device's streams. A stream without
  // kernels (an engine's copy stream) never counts.
  double stalled_on_copies_ms = 0;
  uint64_t kernels = 0;
  uint64_t copies = 0;
};

}  // namespace pinion

#endif  // PINION_DEVICE_EMULATED_TIME_STATS_H_
