// Keeps pages in RAM (mlock2), with a refusal that names the limit.
//
//   PINION_RETURN_IF_ERROR(LockPages(data, 64 * kMiB, MLOCK_ONFAULT));   // is that much allowed?
//   ... touch them with several threads ...
//   PINION_RETURN_IF_ERROR(LockPages(data, 64 * kMiB, 0));               // all of them are there
//
// Unmapping unlocks, and so does UnlockPages. Thread safety: thread-safe.

#ifndef PINION_ALLOCATOR_SOURCES_PAGE_LOCK_H_
#define PINION_ALLOCATOR_SOURCES_PAGE_LOCK_H_

#include <cstdint>

#include "absl/status/status.h"

namespace pinion {

// `flags` as those of mlock2: 0 makes pages present, MLOCK_ONFAULT locks those that are and the
// others once they are touched. ResourceExhausted, with RLIMIT_MEMLOCK, what is locked of it, and
// the remedy for whatever refused: the limit, a filter, the number of mappings, or the host's free
// memory.
// Then the range is unlocked, what the caller had locked of it before included.
absl::Status LockPages(void* data, uint64_t size_bytes, unsigned flags);

// For memory that somebody else may not unmap.
void UnlockPages(void* data, uint64_t size_bytes);

}  // namespace pinion

#endif  // PINION_ALLOCATOR_SOURCES_PAGE_LOCK_H_
