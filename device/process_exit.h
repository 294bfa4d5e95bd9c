// Tells destructors that the process is exiting and that they must not call a device.
//
//   MyCache::~MyCache() {
//     if (ProcessIsExiting()) return;  // leaks: the operating system frees the memory
//     ...
//   }
//
// Calling a device is undefined once its runtime has unloaded. WatchProcess() registers an exit
// handler that sets a flag. Handlers run in reverse order of registration. So the flag is set
// before any object is destroyed that was complete before WatchProcess(), and before the runtime,
// loaded earlier, unloads.
//
// In a shared library that contains Pinion, dlclose() counts as an exit: its statics leak their
// device resources. Children of fork() are covered by allocator/base/fork_origin.h.
//
// Thread safety: thread-safe.

#ifndef PINION_DEVICE_PROCESS_EXIT_H_
#define PINION_DEVICE_PROCESS_EXIT_H_

#include <atomic>

namespace pinion {

namespace internal {
extern std::atomic<bool> process_is_exiting;
}  // namespace internal

// Registers the exit handler, once per process. Objects that call a device call it when created.
void WatchProcess();

inline bool ProcessIsExiting() {
  return internal::process_is_exiting.load(std::memory_order_relaxed);
}

}  // namespace pinion

#endif  // PINION_DEVICE_PROCESS_EXIT_H_
