// Whether this process may still call devices: not while it exits, and not in a forked child.
//
// Once the runtime of a device unloads, calling it is undefined. Destructors that would call a
// device ask here first, and leak instead when the answer is yes: the operating system takes it all
// back anyway. Accelerators do not survive fork() either.
//
// How it works: an atexit handler sets a flag. Handlers run in reverse order of registration, so
// the flag is up before any object is destroyed that was complete before WatchProcess() was
// called, and the device's runtime, which was loaded earlier still, goes later.
//
// Thread safety: thread-safe.

#ifndef PINION_DEVICE_PROCESS_EXIT_H_
#define PINION_DEVICE_PROCESS_EXIT_H_

namespace pinion {

// Registers the handlers, once per process. Whatever calls a device does it when it is made.
void WatchProcess();

bool ProcessIsExiting();

// How many fork() calls lie between the process that called WatchProcess and this one.
int ForkGeneration();

}  // namespace pinion

#endif  // PINION_DEVICE_PROCESS_EXIT_H_
