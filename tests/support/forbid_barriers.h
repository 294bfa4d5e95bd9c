// Makes the kernel refuse membarrier(2), as a container's seccomp filter may. A BiasedMutex that
// then runs a barrier ends the program, which a death test can observe.
//
//   EXPECT_DEATH({ ForbidBarriers(); mu.Lock(By::kOther); }, "seccomp filter");
//
// Thread safety: affects the calling thread and threads that it starts later.

#ifndef PINION_TESTS_SUPPORT_FORBID_BARRIERS_H_
#define PINION_TESTS_SUPPORT_FORBID_BARRIERS_H_

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>
#include <iterator>

#include "gtest/gtest.h"
#include "pinion/tests/support/child_process.h"

namespace pinion::testing {

// Returns false if the kernel does not allow such a filter.
inline bool ForbidBarriers() {
  sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_membarrier, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program = {std::size(filter), filter};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

// Returns whether ForbidBarriers works here; a child process tries it.
inline bool MayForbidBarriers() {
  ChildProcess child([] { EXPECT_TRUE(ForbidBarriers()); });
  return child.Wait() == 0;
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_FORBID_BARRIERS_H_
