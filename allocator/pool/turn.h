// A re-entrant serial section for long work that several threads may want done at once.
//
//   const TurnHolder mine(turn_);
//   if (AlreadyDone()) return;   // another thread was first
//   ...
//
// The work may call the operating system and user callbacks, so this is not a Mutex. A callback may
// come back to the same allocator on the same thread, so the section is re-entrant. A callback may
// also call another allocator, whose callback calls this one. To avoid a deadlock, a thread that is
// in one section does not wait for another one. The section must therefore be safe, if slower, when
// two threads are in it.
//
// Thread safety: thread-safe.

#ifndef PINION_ALLOCATOR_POOL_TURN_H_
#define PINION_ALLOCATOR_POOL_TURN_H_

#include <thread>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"

namespace pinion::internal {

class Turn {
 private:
  friend class TurnHolder;

  Mutex mu_;
  CondVar ended_;
  std::thread::id holder_ ABSL_GUARDED_BY(mu_);  // none: the section is free
};

extern constinit thread_local int turns_of_this_thread;  // sections that it is in

class TurnHolder {
 public:
  explicit TurnHolder(Turn& turn) : turn_(turn) {
    MutexLock lock(turn_.mu_);
    if (turns_of_this_thread++ == 0) {
      while (turn_.holder_ != std::thread::id()) turn_.ended_.Wait(turn_.mu_);
    }
    if (turn_.holder_ != std::thread::id()) return;
    turn_.holder_ = std::this_thread::get_id();
    has_it_ = true;
  }
  ~TurnHolder() {
    --turns_of_this_thread;
    if (!has_it_) return;
    {
      MutexLock lock(turn_.mu_);
      turn_.holder_ = std::thread::id();
    }
    turn_.ended_.NotifyAll();
  }
  TurnHolder(const TurnHolder&) = delete;
  TurnHolder& operator=(const TurnHolder&) = delete;

 private:
  Turn& turn_;
  bool has_it_ = false;  // false: the section is entered again, or another thread's
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_TURN_H_
