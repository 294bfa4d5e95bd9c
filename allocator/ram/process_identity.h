// Names a process so that another one, which got its pid later, is not taken for it.
//
//   slot.owner = OwnProcess();
//   ...                                          // in another process
//   if (!IsRunning(slot.owner)) slot.owner = 0;  // it died without saying so
//
// Thread safety: thread-safe. OwnProcess costs a system call, IsRunning reads a file of /proc.

#ifndef PINION_ALLOCATOR_RAM_PROCESS_IDENTITY_H_
#define PINION_ALLOCATOR_RAM_PROCESS_IDENTITY_H_

#include <cstdint>

namespace pinion {

// The pid and the time of the start. Never 0. Means something to processes of the same pid
// namespace, until the host is booted again.
using ProcessIdentity = uint64_t;

// Of the calling process; differs in a child of fork().
ProcessIdentity OwnProcess();

// False once the process has ended, whether its parent has asked for its status or not.
bool IsRunning(ProcessIdentity process);

// The number of the calling process's pid namespace; 0 if the kernel does not tell.
uint64_t PidNamespace();

}  // namespace pinion

#endif  // PINION_ALLOCATOR_RAM_PROCESS_IDENTITY_H_
