#include "pinion/allocator/base/mutex.h"

#include <time.h>

#include <atomic>
#include <thread>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace pinion {
namespace {

absl::Duration TimeOf(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return absl::DurationFromTimespec(now);
}

// A waiter that spins would take the processor from the thread that holds the mutex.
TEST(MutexTest, AThreadThatWaitsLongSleeps) {
  Mutex mu;
  mu.Lock();
  absl::Duration used, passed;
  std::atomic<bool> waits = false;
  std::thread waiter([&] {
    const absl::Duration start = TimeOf(CLOCK_MONOTONIC);
    waits = true;
    mu.Lock();
    used = TimeOf(CLOCK_THREAD_CPUTIME_ID);
    passed = TimeOf(CLOCK_MONOTONIC) - start;
    mu.Unlock();
  });
  while (!waits) absl::SleepFor(absl::Milliseconds(1));
  absl::SleepFor(absl::Milliseconds(300));
  mu.Unlock();
  waiter.join();
  // On a busy host the sleep takes longer, and a waiter that spins has less of each second.
  EXPECT_LT(used, passed / 5);
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
