// Child processes made by fork(), and gates at which processes wait for each other.
//
//   Gate ready;
//   ChildProcess child([&] {
//     ...
//     ready.Open();
//     Gate::WaitForEver();
//   });
//   ready.Pass();                          // returns once the child has opened it
//   child.Kill();
//   EXPECT_EQ(child.Wait(), -SIGKILL);
//
// The exit status is 1 if an expectation in the body fails. The test must have one thread when it
// forks. Exception: ForkInTheMiddleOf.

#ifndef PINION_TESTS_SUPPORT_CHILD_PROCESS_H_
#define PINION_TESTS_SUPPORT_CHILD_PROCESS_H_

#include <signal.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>

#include "gtest/gtest.h"
#include "pinion/allocator/base/check.h"

namespace pinion::testing {

class Gate {
 public:
  Gate() { PINION_CHECK(pipe(ends_) == 0); }
  ~Gate() {
    close(ends_[0]);
    close(ends_[1]);
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  void Open() { PINION_CHECK(write(ends_[1], "x", 1) == 1); }
  void Pass() {
    char byte;
    PINION_CHECK(read(ends_[0], &byte, 1) == 1);
  }

  [[noreturn]] static void WaitForEver() {
    while (true) pause();
  }

 private:
  int ends_[2];
};

class ChildProcess {
 public:
  explicit ChildProcess(const std::function<void()>& body) : pid_(fork()) {
    PINION_CHECK(pid_ >= 0);
    if (pid_ != 0) return;
    body();
    _exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  ~ChildProcess() {
    if (pid_ == 0) return;
    Kill();
    Wait();
  }
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }
  void Kill() { PINION_CHECK(kill(pid_, SIGKILL) == 0); }
  // Blocks until the child has ended, without reaping it.
  void AwaitEnd() {
    siginfo_t info;
    PINION_CHECK(waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT) == 0);
  }
  // Returns the exit status, or minus the signal that ended the child.
  int Wait() {
    int status = 0;
    PINION_CHECK(waitpid(pid_, &status, 0) == pid_);
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  pid_t pid_;
};

// Forks repeatedly while two threads repeat `others`; each child must complete `own`.
inline void ForkInTheMiddleOf(const std::function<void()>& others,
                              const std::function<void()>& own) {
  std::atomic<bool> stop = false;
  const auto repeat = [&] {
    while (!stop) others();
  };
  std::thread threads[2] = {std::thread(repeat), std::thread(repeat)};
  for (int round = 0; round < 100; ++round) {
    ChildProcess child(own);
    const int outcome = child.Wait();
    EXPECT_EQ(outcome, 0) << "round " << round;
    if (outcome != 0) break;
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_CHILD_PROCESS_H_
