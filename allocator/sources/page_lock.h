// Locks pages in RAM (mlock2), with an error that names the limit and the remedy.
//
//   PINION_RETURN_IF_ERROR(LockPages(data, 64 * kMiB, MLOCK_ONFAULT));   // checks the limit
//   ... touch them with several threads ...
//   PINION_RETURN_IF_ERROR(LockPages(data, 64 * kMiB, 0));               // commits all of them
//
// Unmapping unlocks, and so does UnlockPages. Thread safety: thread-safe.

#ifndef PINION_ALLOCATOR_SOURCES_PAGE_LOCK_H_
#define PINION_ALLOCATOR_SOURCES_PAGE_LOCK_H_

#include <cstdint>

#include "absl/status/status.h"

namespace pinion {

// `flags` are those of mlock2: 0 commits the pages, MLOCK_ONFAULT locks a page when it is touched.
// Returns ResourceExhausted with RLIMIT_MEMLOCK, the locked bytes, and a remedy for what refused.
// That may be the limit, a filter, the number of mappings, or the host's free memory. After an
// error the whole range is unlocked, even parts that the caller had locked.
absl::Status LockPages(void* data, uint64_t size_bytes, unsigned flags);

// For memory that the caller may not unmap.
void UnlockPages(void* data, uint64_t size_bytes);

}  // namespace pinion

#endif  // PINION_ALLOCATOR_SOURCES_PAGE_LOCK_H_
