// Options of a pinned pool that ignores the watermarks of host RAM, so that a benchmark measures
// the same on a host whose RAM is in use.

#ifndef PINION_BENCH_POOL_OPTIONS_H_
#define PINION_BENCH_POOL_OPTIONS_H_

#include "pinion/allocator/allocator_options.h"

namespace pinion {

inline AllocatorOptions BenchPoolOptions() {
  AllocatorOptions options;
  options.warn_percent = options.high_percent = options.low_percent = 100;
  return options;
}

}  // namespace pinion

#endif  // PINION_BENCH_POOL_OPTIONS_H_
