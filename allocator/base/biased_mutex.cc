#include "pinion/allocator/base/biased_mutex.h"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <thread>

#include "pinion/allocator/base/check.h"

namespace pinion {
namespace {

// How often the owner is looked for before the processor is left to it.
constexpr int kLooksForOwner = 100;

bool Register() {
  return syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
}

bool RunBarrier() { return syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0) == 0; }

}  // namespace

BiasedMutex::Barrier BiasedMutex::BestBarrier() {
  static const bool registered = Register();
  return registered ? Barrier::kOfTheKernel : Barrier::kOfBoth;
}

void BiasedMutex::LockAsOther() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  mu_.Lock();
  if (barrier_ == Barrier::kNobodyOwnsIt) return;
  others_.store(true, std::memory_order_seq_cst);
  if (barrier_ == Barrier::kOfTheKernel) {
    // A child of fork() may have to register again.
    PINION_CHECK(RunBarrier() || (Register() && RunBarrier()))
        << "membarrier(2) fails, which this process could call before: let a seccomp filter pass "
           "it";
  }
  for (int looks = 0; inside_.load(std::memory_order_seq_cst); ++looks) {
    if (looks >= kLooksForOwner) std::this_thread::yield();
  }
}

void BiasedMutex::UnlockAsOther() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  if (barrier_ != Barrier::kNobodyOwnsIt) others_.store(false, std::memory_order_release);
  mu_.Unlock();
}

void BiasedMutex::LockAfterOthers() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  inside_.store(false, std::memory_order_release);
  mu_.Lock();
}

void BiasedMutex::UnlockAfterOthers() ABSL_NO_THREAD_SAFETY_ANALYSIS { mu_.Unlock(); }

}  // namespace pinion
