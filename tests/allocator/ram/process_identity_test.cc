#include "pinion/allocator/ram/process_identity.h"

#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>

#include "gtest/gtest.h"
#include "pinion/tests/support/child_process.h"
#include "pinion/tests/support/fake_host.h"

namespace pinion {
namespace {

using ::pinion::testing::ChildProcess;
using ::pinion::testing::FakeHost;
using ::pinion::testing::Gate;

// The pid is in the upper bits, the start in the lower ones.
constexpr int kStartBits = 42;

TEST(ProcessIdentityTest, AProcessKnowsThatItRuns) {
  EXPECT_EQ(OwnProcess(), OwnProcess());
  EXPECT_EQ(OwnProcess() >> kStartBits, static_cast<uint64_t>(getpid()));
  EXPECT_TRUE(IsRunning(OwnProcess()));
}

TEST(ProcessIdentityTest, NobodyHasTheIdentityZero) { EXPECT_FALSE(IsRunning(0)); }

TEST(ProcessIdentityTest, ARecycledPidIsAnotherProcess) {
  EXPECT_FALSE(IsRunning(OwnProcess() + 1));
  EXPECT_FALSE(IsRunning(OwnProcess() - 1));
}

// Where the start could not be read, the pid is all there is.
TEST(ProcessIdentityTest, WithoutAStartThePidDecides) {
  EXPECT_TRUE(IsRunning(OwnProcess() >> kStartBits << kStartBits));
}

TEST(ProcessIdentityTest, AChildIsAnotherProcessThanItsParent) {
  const ProcessIdentity parent = OwnProcess();
  ChildProcess child([parent] {
    EXPECT_NE(OwnProcess(), parent);
    EXPECT_TRUE(IsRunning(OwnProcess()));
    EXPECT_TRUE(IsRunning(parent));
  });
  EXPECT_EQ(child.Wait(), 0);
}

// A grandchild that is given the pid of the grandparent, and has what that knew about itself.
TEST(ProcessIdentityTest, AGrandchildWithTheSamePidIsAnotherProcess) {
  constexpr int kSame = 1;
  constexpr int kNoSuchPid = 2;
  Gate grandparent_ended;
  int result[2];
  ASSERT_EQ(pipe(result), 0);
  ChildProcess grandparent([&] {
    const ProcessIdentity inherited = OwnProcess();
    const pid_t pid = getpid();
    if (fork() != 0) return;
    grandparent_ended.Pass();
    usleep(20'000);  // starts are told apart by ticks of 10 ms
    char outcome = kNoSuchPid;
    for (int attempt = 0; attempt < 100 && outcome == kNoSuchPid; ++attempt) {
      // Asks for the next pid; somebody else may be faster.
      std::ofstream("/proc/sys/kernel/ns_last_pid") << pid - 1;
      ChildProcess grandchild([&] {
        if (getpid() != pid) _exit(kNoSuchPid);
        _exit(OwnProcess() == inherited ? kSame : 0);
      });
      outcome = static_cast<char>(grandchild.Wait());
    }
    EXPECT_EQ(write(result[1], &outcome, 1), 1);
    _exit(0);
  });
  EXPECT_EQ(grandparent.Wait(), 0);
  grandparent_ended.Open();
  char outcome = 0;
  ASSERT_EQ(read(result[0], &outcome, 1), 1);
  if (outcome == kNoSuchPid) GTEST_SKIP() << "this process may not choose a pid";
  EXPECT_EQ(outcome, 0) << "taken for its grandparent";
}

TEST(ProcessIdentityTest, ANameWithParenthesesAndSpacesIsReadOver) {
  ChildProcess child([] {
    EXPECT_EQ(prctl(PR_SET_NAME, "a) R (b c"), 0);
    EXPECT_TRUE(IsRunning(OwnProcess()));
  });
  EXPECT_EQ(child.Wait(), 0);
}

TEST(ProcessIdentityTest, AKilledProcessDoesNotRunEvenBeforeItsParentHasAsked) {
  int identity[2];
  ASSERT_EQ(pipe(identity), 0);
  ChildProcess child([&] {
    const ProcessIdentity own = OwnProcess();
    EXPECT_EQ(write(identity[1], &own, sizeof(own)), static_cast<ssize_t>(sizeof(own)));
    Gate::WaitForEver();
  });
  ProcessIdentity process = 0;
  ASSERT_EQ(read(identity[0], &process, sizeof(process)), static_cast<ssize_t>(sizeof(process)));
  EXPECT_TRUE(IsRunning(process));
  child.Kill();
  child.AwaitEnd();
  EXPECT_FALSE(IsRunning(process)) << "a zombie";
  child.Wait();
  EXPECT_FALSE(IsRunning(process));
}

// As in a jail whose processes see no /proc.
TEST(ProcessIdentityTest, WithoutProcThePidDecides) {
  constexpr int kMayNotChangeTheRoot = 2;
  constexpr uid_t kSomebodyElse = 12345;
  FakeHost empty;
  const ProcessIdentity parent = OwnProcess();
  ProcessIdentity gone = 0;
  {
    int identity[2];
    ASSERT_EQ(pipe(identity), 0);
    ChildProcess short_lived([&] {
      const ProcessIdentity own = OwnProcess();
      EXPECT_EQ(write(identity[1], &own, sizeof(own)), static_cast<ssize_t>(sizeof(own)));
    });
    EXPECT_EQ(short_lived.Wait(), 0);
    ASSERT_EQ(read(identity[0], &gone, sizeof(gone)), static_cast<ssize_t>(sizeof(gone)));
  }
  ChildProcess child([&] {
    if (chroot(empty.root().c_str()) != 0 &&
        (unshare(CLONE_NEWUSER) != 0 || chroot(empty.root().c_str()) != 0)) {
      _exit(kMayNotChangeTheRoot);
    }
    EXPECT_EQ(PidNamespace(), 0u);
    EXPECT_TRUE(IsRunning(OwnProcess()));
    EXPECT_TRUE(IsRunning(parent));
    EXPECT_FALSE(IsRunning(gone));
    // Whom it may not send a signal to is there all the same.
    if (setuid(kSomebodyElse) != 0) return;
    EXPECT_EQ(kill(getppid(), 0), -1);
    EXPECT_TRUE(IsRunning(parent));
    EXPECT_FALSE(IsRunning(gone));
  });
  const int outcome = child.Wait();
  if (outcome == kMayNotChangeTheRoot) GTEST_SKIP() << "this process may not change its root";
  EXPECT_EQ(outcome, 0);
}

TEST(ProcessIdentityTest, ThisHostTellsThePidNamespace) { EXPECT_NE(PidNamespace(), 0u); }

}  // namespace
}  // namespace pinion
