// What several arenas did, as one.

#ifndef PINION_ALLOCATOR_POOL_STATS_SUM_H_
#define PINION_ALLOCATOR_POOL_STATS_SUM_H_

#include "pinion/allocator/allocator_stats.h"

namespace pinion::internal {

// Adds what PoolBooks counts; of `numa_nodes`, which `sum` must have, the bytes in use. Peaks need
// not have been at one time: their sum is a bound.
void AddStats(const AllocatorStats& stats, AllocatorStats* sum);

// What moved from arena to arena was cached in both, at different times: no peak is above what
// there ever was, and what was locked.
void BoundPeaks(AllocatorStats* sum);

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_STATS_SUM_H_
