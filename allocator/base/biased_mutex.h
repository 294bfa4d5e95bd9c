// A mutex that its owner thread locks without an atomic read-modify-write, in about a nanosecond.
// Other threads pay about a microsecond: they run a barrier on all processors of this process
// (membarrier(2)).
//
//   owner   inside = true;
//           if (others == 0) ...                               inside = false;
//           else inside = false; mu.Lock(); ...                mu.Unlock();
//   other   mu.Lock(); ++others; barrier; while (inside) wait; ...  --others; mu.Unlock();
//
// This is Dekker's algorithm with both fences on one side. Without membarrier, and where no thread
// is the owner, all threads lock the inner Mutex. `others` is then never 0.
//
// A thread that locks many of these mutexes announces itself to all of them and runs one barrier.
// Meanwhile their owners can still lock them, through the inner Mutex.
//
//   for (BiasedMutex* mu : all) mu->Announce();
//   BiasedMutex::RunBarrier();
//   ... { BiasedLock lock(*all[i], BiasedMutex::By::kAnnounced); ... }
//   for (BiasedMutex* mu : all) mu->Renounce();
//
// The barrier is a system call that is made with the inner Mutex locked. It takes until the kernel
// has reached all processors.
//
// Thread safety: thread-safe. At most one thread at a time is the owner. A new owner must come
// after the previous one in the happens-before order.

#ifndef PINION_ALLOCATOR_BASE_BIASED_MUTEX_H_
#define PINION_ALLOCATOR_BASE_BIASED_MUTEX_H_

#include <atomic>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/check.h"
#include "pinion/allocator/base/mutex.h"
#include "pinion/config/build_config.h"

namespace pinion {

class ABSL_LOCKABLE BiasedMutex {
 public:
  enum class Barrier { kOfTheKernel, kNone };

  // The role in which a thread locks the mutex.
  enum class By { kOwner, kOther, kAnnounced };

  explicit BiasedMutex(Barrier barrier = BestBarrier())
      : barrier_(barrier), others_(barrier == Barrier::kNone ? 1 : 0) {}
  BiasedMutex(const BiasedMutex&) = delete;
  BiasedMutex& operator=(const BiasedMutex&) = delete;

  // Not re-entrant: a second call of the owner would be let in.
  void Lock(By by) ABSL_EXCLUSIVE_LOCK_FUNCTION() {
    if (by != By::kOwner) return LockAsOther(by);
    PINION_CHECK(!config::kHardened || !inside_.load(std::memory_order_relaxed))
        << "the owner is inside already";
    inside_.store(true, std::memory_order_relaxed);
    asm volatile("" ::: "memory");
    if (others_.load(std::memory_order_acquire) != 0) [[unlikely]]
      LockAsOwnerSlowly();
  }
  void Unlock(By by) ABSL_UNLOCK_FUNCTION() {
    if (by != By::kOwner) return UnlockAsOther(by);
    if (inside_.load(std::memory_order_relaxed)) [[likely]] {
      inside_.store(false, std::memory_order_release);
    } else {
      mu_.Unlock();
    }
  }

  // For kAnnounced: valid from the RunBarrier that follows to the Renounce.
  void Announce() { others_.fetch_add(1, std::memory_order_seq_cst); }
  static void RunBarrier();
  void Renounce() { others_.fetch_sub(1, std::memory_order_release); }

  static Barrier BestBarrier();

 private:
  void LockAsOther(By by);
  void UnlockAsOther(By by);
  void LockAsOwnerSlowly();

  const Barrier barrier_;
  std::atomic<bool> inside_ = false;  // the owner; it may also hold mu_ instead
  std::atomic<uint32_t> others_;      // how many have mu_ or want it, who are not the owner
  Mutex mu_;
};

class [[nodiscard]] ABSL_SCOPED_LOCKABLE BiasedLock {
 public:
  [[nodiscard]] BiasedLock(BiasedMutex& mu, BiasedMutex::By by) ABSL_EXCLUSIVE_LOCK_FUNCTION(mu)
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
