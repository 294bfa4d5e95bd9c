// The host with ample RAM that tests find (roomy_host.cc), for tests that replace open(2)
// themselves.
//
//   extern "C" int open(const char* path, int flags, ...) {
//     if (path is the test's own) ...
//     return pinion::testing::OpenOnRoomyHost(path, flags, mode);
//   }
//
// Thread safety: thread-safe.

#ifndef PINION_TESTS_SUPPORT_ROOMY_HOST_H_
#define PINION_TESTS_SUPPORT_ROOMY_HOST_H_

#include <sys/types.h>

namespace pinion::testing {

// Opens the file on this host, as open(2) does.
int OpenOnRoomyHost(const char* path, int flags, mode_t mode);

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_ROOMY_HOST_H_
