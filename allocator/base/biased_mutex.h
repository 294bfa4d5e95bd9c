// A mutex that one thread, its owner, takes and leaves without an atomic read-modify-write: two
// plain stores and a load, about a nanosecond. All others pay for it, about a microsecond: they ask
// the kernel to run a barrier on every processor that runs a thread of this process
// (membarrier(2)), after which the owner has either seen them or is inside.
//
//   owner   inside = true;                      if (!others) ... inside = false;
//   other   mu.Lock(); others = true; barrier;  while (inside) wait; ... others = false;
//   mu.Unlock()
//
// This is Dekker's algorithm with the fences of one side moved to the other. Where the kernel has
// no membarrier, both sides use sequentially consistent accesses. One that nobody owns is a Mutex.
//
// Thread safety: thread-safe. At most one thread at a time may be the owner; a new one must come
// after the last one in the happens-before order.

#ifndef PINION_ALLOCATOR_BASE_BIASED_MUTEX_H_
#define PINION_ALLOCATOR_BASE_BIASED_MUTEX_H_

#include <atomic>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"

namespace pinion {

class ABSL_LOCKABLE BiasedMutex {
 public:
  enum class Barrier { kOfTheKernel, kOfBoth, kNobodyOwnsIt };

  // As whom a thread takes it.
  enum class By { kOwner, kOther };

  explicit BiasedMutex(Barrier barrier = BestBarrier()) : barrier_(barrier) {}
  BiasedMutex(const BiasedMutex&) = delete;
  BiasedMutex& operator=(const BiasedMutex&) = delete;

  void Lock(By by) ABSL_EXCLUSIVE_LOCK_FUNCTION() {
    if (by == By::kOther) return LockAsOther();
    if (barrier_ == Barrier::kOfTheKernel) {
      inside_.store(true, std::memory_order_relaxed);
      asm volatile("" ::: "memory");
      if (!others_.load(std::memory_order_acquire)) return;
    } else {
      inside_.store(true, std::memory_order_seq_cst);
      if (!others_.load(std::memory_order_seq_cst)) return;
    }
    LockAfterOthers();
  }

  void Unlock(By by) ABSL_UNLOCK_FUNCTION() {
    if (by == By::kOther) return UnlockAsOther();
    if (inside_.load(std::memory_order_relaxed)) {
      inside_.store(false, std::memory_order_release);
    } else {
      UnlockAfterOthers();
    }
  }

  static Barrier BestBarrier();

 private:
  void LockAsOther();
  void UnlockAsOther();
  void LockAfterOthers();
  void UnlockAfterOthers();

  const Barrier barrier_;
  std::atomic<bool> inside_ = false;  // the owner; it may also hold mu_ instead
  std::atomic<bool> others_ = false;  // somebody else has mu_
  Mutex mu_;
};

class ABSL_SCOPED_LOCKABLE BiasedLock {
 public:
  BiasedLock(BiasedMutex& mu, BiasedMutex::By by) ABSL_EXCLUSIVE_LOCK_FUNCTION(mu)
      : mu_(mu), by_(by) {
    mu_.Lock(by);
  }
  ~BiasedLock() ABSL_UNLOCK_FUNCTION() { mu_.Unlock(by_); }
  BiasedLock(const BiasedLock&) = delete;
  BiasedLock& operator=(const BiasedLock&) = delete;

 private:
  BiasedMutex& mu_;
  const BiasedMutex::By by_;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_BASE_BIASED_MUTEX_H_
