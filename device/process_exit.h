// Whether this process exits, and may call devices no more. (For children of fork(), which may not
// either, see allocator/base/fork_origin.h.)
//
// Once the runtime of a device unloads, calling it is undefined. Destructors that would call a
// device ask here first, and leak instead when the answer is yes: the operating system takes it all
// back anyway.
//
// How it works: an exit handler sets a flag. Handlers run in reverse order of registration, so
// the flag is up before any object is destroyed that was complete before WatchProcess() was
// called, and the device's runtime, which was loaded earlier still, goes later.
//
// To a shared library with Pinion inside, dlclose() is an exit: its statics leak what they hold of
// a device.
//
// Thread safety: thread-safe.

#ifndef PINION_DEVICE_PROCESS_EXIT_H_
#define PINION_DEVICE_PROCESS_EXIT_H_

#include <atomic>

namespace pinion {

namespace internal {
extern std::atomic<bool> process_is_exiting;
}  // namespace internal

// Registers the handler, once per process. Whatever calls a device does it when it is made.
void WatchProcess();

inline bool ProcessIsExiting() {
  return internal::process_is_exiting.load(std::memory_order_relaxed);
}

}  // namespace pinion

#endif  // PINION_DEVICE_PROCESS_EXIT_H_
