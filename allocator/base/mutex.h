// A mutex and a condition variable with annotations for clang's thread-safety analysis
// (`--config=clang`), and a back-off.
//
//   Mutex mu_;
//   int value_ ABSL_GUARDED_BY(mu_) = 0;
//   ...
//   MutexLock lock(mu_);
//   while (value_ == 0) changed_.Wait(mu_);
//
// Why not absl::Mutex: ThreadSanitizer cannot see into a prebuilt Abseil, and reports false races.
// Why not std::mutex: it costs a third of an allocation's time. A thread that finds it locked
// sleeps for 50 us, while these locks are held for less than one.
//
// House rule: no device call and no operating-system call while a Mutex is locked. Exceptions are
// the calls that locks and the C++ heap are made of: futex(2), sched_yield(2) (std::atomic::wait)
// and nanosleep(2) here, membarrier(2) in biased_mutex.h, and mmap(2).

#ifndef PINION_ALLOCATOR_BASE_MUTEX_H_
#define PINION_ALLOCATOR_BASE_MUTEX_H_

#include <atomic>

#include "absl/base/config.h"
#include "absl/base/thread_annotations.h"

#ifdef ABSL_HAVE_THREAD_SANITIZER
#include <sanitizer/tsan_interface.h>
#define PINION_TSAN_MUTEX(call) call
#else
#define PINION_TSAN_MUTEX(call)
#endif

namespace pinion {

// Pauses with exponential back-off, for a thread that waits for another one.
//
//   for (Spin spin; spin.Again();) {
//     if (IsFree()) return;
//   }
//   ... sleep until notified ...
//
//   for (Spin spin; !IsDone();) spin.Wait();      // where nobody notifies
class Spin {
 public:
  // Pauses and returns true, or returns false if it is time to sleep.
  bool Again();

  // Pauses, or sleeps if it is time to. Only sleeping gives the processor to a thread of lower
  // priority.
  void Wait();

 private:
  int looks_ = 0;
  int pauses_ = 0;
};

// Spins for a moment, then sleeps. Zero-initialised storage is an unlocked mutex.
class ABSL_LOCKABLE Mutex {
 public:
  constexpr Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() {
    PINION_TSAN_MUTEX(__tsan_mutex_pre_lock(this, __tsan_mutex_linker_init));
    if (!TakeIfFree()) LockSlowly();
    PINION_TSAN_MUTEX(__tsan_mutex_post_lock(this, __tsan_mutex_linker_init, 0));
  }

  void Unlock() ABSL_UNLOCK_FUNCTION() {
    PINION_TSAN_MUTEX(__tsan_mutex_pre_unlock(this, __tsan_mutex_linker_init));
    // The next owner may destroy the mutex at once. Only the address is used from here on.
    if (state_.exchange(kFree) == kContended) state_.notify_one();
    PINION_TSAN_MUTEX(__tsan_mutex_post_unlock(this, __tsan_mutex_linker_init));
  }

 private:
  static constexpr int kFree = 0;
  static constexpr int kHeld = 1;
  static constexpr int kContended = 2;  // held, and somebody may be asleep

  bool TakeIfFree() {
    int free = kFree;
    return state_.compare_exchange_strong(free, kHeld, std::memory_order_acquire,
                                          std::memory_order_relaxed);
  }
  void LockSlowly();

  std::atomic<int> state_ = kFree;
};

class [[nodiscard]] ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  [[nodiscard]] explicit MutexLock(Mutex& mu) ABSL_EXCLUSIVE_LOCK_FUNCTION(mu) : mu_(mu) {
    mu_.Lock();
  }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mu_.Unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mu_;
};

class CondVar {
 public:
  constexpr CondVar() = default;
  CondVar(const CondVar&) = delete;
  CondVar& operator=(const CondVar&) = delete;

  // Releases `mu`, sleeps until notified (or spuriously), and takes `mu` again.
  void Wait(Mutex& mu) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    // Every later notification changes the number.
    const int before = notified_.load(std::memory_order_relaxed);
    mu.Unlock();
    notified_.wait(before, std::memory_order_relaxed);
    mu.Lock();
  }

  void NotifyAll() {
    notified_.fetch_add(1);
    notified_.notify_all();
  }

 private:
  std::atomic<int> notified_ = 0;
};

}  // namespace pinion

#undef PINION_TSAN_MUTEX

#endif  // PINION_ALLOCATOR_BASE_MUTEX_H_
