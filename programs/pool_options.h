// Options of a pinned pool that ignores the watermarks of host RAM, for benchmarks and for
// the emulated device: they do the same on a host whose RAM is in use.

#ifndef PINION_PROGRAMS_POOL_OPTIONS_H_
#define PINION_PROGRAMS_POOL_OPTIONS_H_

#include "pinion/allocator/allocator_options.h"

namespace pinion {

inline AllocatorOptions PoolWithoutWatermarks() {
  AllocatorOptions options;
  options.warn_percent = options.high_percent = options.low_percent = 100;
  return options;
}

}  // namespace pinion

#endif  // PINION_PROGRAMS_POOL_OPTIONS_H_
