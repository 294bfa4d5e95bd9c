#include "pinion/allocator/base/mutex.h"

#include <time.h>

#include <atomic>
#include <thread>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace pinion {
namespace {

absl::Duration CpuTimeOfThisThread() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return absl::DurationFromTimespec(now);
}

// A waiter that spins would take the processor from the thread that holds the mutex.
TEST(MutexTest, AThreadThatWaitsLongSleeps) {
  Mutex mu;
  mu.Lock();
  absl::Duration used;
  std::thread waiter([&] {
    mu.Lock();
    used = CpuTimeOfThisThread();
    mu.Unlock();
  });
  absl::SleepFor(absl::Milliseconds(300));
  mu.Unlock();
  waiter.join();
  EXPECT_LT(used, absl::Milliseconds(60));
}

TEST(MutexTest, AfterAWaitTheMutexIsHeldAgain) {
  Mutex mu;
  CondVar changed;
  bool there = false;
  mu.Lock();
  std::thread other([&] {
    MutexLock lock(mu);
    there = true;
    changed.NotifyAll();
  });
  while (!there) changed.Wait(mu);
  std::atomic<bool> taken = false;
  std::thread next([&] {
    MutexLock lock(mu);
    taken = true;
  });
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_FALSE(taken);
  mu.Unlock();
  other.join();
  next.join();
}

}  // namespace
}  // namespace pinion
