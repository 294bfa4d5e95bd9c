// Adds up the statistics of several arenas.

#ifndef PINION_ALLOCATOR_POOL_STATS_SUM_H_
#define PINION_ALLOCATOR_POOL_STATS_SUM_H_

#include "pinion/allocator/allocator_stats.h"

namespace pinion::internal {

// Adds the counters of PoolBooks, and the used bytes of the `numa_nodes` that `sum` has. The sum of
// peaks is an upper bound, because the peaks may be of different times.
void AddStats(const AllocatorStats& stats, AllocatorStats* sum);

// Caps each peak by the gauge's total and by the locked peak. Memory that moved between arenas is
// in the cached peak of both.
void BoundPeaks(AllocatorStats* sum);

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_STATS_SUM_H_
