// Keeps objects that must never be destroyed: memory that a device may still write to, or state
// that a child of fork() inherited half changed. The operating system reclaims them.
//
// Thread safety: thread-safe and lock-free. Ownership: takes it until the process ends. The objects
// stay reachable for leak checkers.

#ifndef PINION_ALLOCATOR_BASE_KEEP_FOR_EVER_H_
#define PINION_ALLOCATOR_BASE_KEEP_FOR_EVER_H_

#include <memory>

namespace pinion {

void KeepForEver(std::shared_ptr<const void> object);

}  // namespace pinion

#endif  // PINION_ALLOCATOR_BASE_KEEP_FOR_EVER_H_
