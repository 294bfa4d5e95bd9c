// For what must not be destroyed: memory that a device may still write to, or what a child of
// fork() inherited in the middle of a change. The operating system takes it back.
//
// Thread safety: thread-safe, without a lock.
// Ownership: takes it, for as long as the process runs. It stays reachable, so that leak checkers
// have nothing to say.

#ifndef PINION_ALLOCATOR_BASE_KEEP_FOR_EVER_H_
#define PINION_ALLOCATOR_BASE_KEEP_FOR_EVER_H_

#include <memory>

namespace pinion {

void KeepForEver(std::shared_ptr<const void> object);

}  // namespace pinion

#endif  // PINION_ALLOCATOR_BASE_KEEP_FOR_EVER_H_
