// What several arenas did, as one.

#ifndef PINION_ALLOCATOR_POOL_STATS_SUM_H_
#define PINION_ALLOCATOR_POOL_STATS_SUM_H_

#include "pinion/allocator/allocator_stats.h"

namespace pinion::internal {

// Adds what PoolBooks counts; of `numa_nodes`, which `sum` must have, the bytes in use. Peaks need
// not have been at one time: their sum is a bound.
void AddStats(const AllocatorStats& stats, AllocatorStats* sum);

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_STATS_SUM_H_
