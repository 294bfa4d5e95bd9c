#include "pinion/allocator/base/biased_mutex.h"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

namespace pinion {
namespace {

// Attempts to run the barrier while the kernel lacks memory for it.
constexpr int kMostBarriers = 1000;
constexpr std::chrono::milliseconds kSleepForMemory(1);

bool Register() {
  return syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
}

// Not a static inside a function: a child of fork() could find the static's own lock taken. To
// register twice does no harm.
enum Registered { kNotTried, kYes, kNo };
constinit std::atomic<Registered> registered = kNotTried;

bool TryBarrier() { return syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) == 0; }

}  // namespace

BiasedMutex::Barrier BiasedMutex::BestBarrier() {
  Registered known = registered.load(std::memory_order_relaxed);
  if (known == kNotTried) {
    known = Register() ? kYes : kNo;
    registered.store(known, std::memory_order_relaxed);
  }
  return known == kYes ? Barrier::kOfTheKernel : Barrier::kNone;
}

void BiasedMutex::RunBarrier() {
  if (BestBarrier() == Barrier::kNone) return;
  for (int i = 0; i < kMostBarriers; ++i) {
    if (TryBarrier()) return;
    if (errno == EPERM) {
      if (Register()) continue;  // a child of fork() may have to do it again
    } else if (errno == ENOMEM) {
      std::this_thread::sleep_for(kSleepForMemory);
      continue;
    }
    break;
  }
  const int error = errno;
  PINION_CHECK(false) << "membarrier(2), which this process could call before, fails with errno "
                      << error << " (" << std::strerror(error)
                      << "); if it is 1, let the seccomp filter pass it";
}

void BiasedMutex::LockAsOther(By by) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  mu_.Lock();
  if (by == By::kOther) {
    if (barrier_ == Barrier::kNone) return;
    Announce();
    RunBarrier();
  }
  for (Spin spin; inside_.load(std::memory_order_seq_cst);) spin.Wait();
}

void BiasedMutex::UnlockAsOther(By by) ABSL_NO_THREAD_SAFETY_ANALYSIS {
  if (by == By::kOther && barrier_ != Barrier::kNone) Renounce();
  mu_.Unlock();
}

void BiasedMutex::LockAsOwnerSlowly() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  inside_.store(false, std::memory_order_release);
  mu_.Lock();
}

}  // namespace pinion
