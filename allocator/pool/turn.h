// A section that one thread at a time is in, for long work that many threads may want done at once:
// whoever has the turn looks first whether another thread has done the work meanwhile.
//
//   const TurnHolder mine(turn_);
//   if (AlreadyDone()) return;
//   ...
//
// A turn is re-entrant: the work calls the operating system and the user's callbacks, which may
// come back to the allocator on the same thread. Therefore it is not a Mutex. They may come to
// another allocator as well, whose callbacks come to this one. If both threads waited, neither
// would go on; so a thread that has one turn does not wait for a second one. Where another thread
// holds that, the two do their work at the same time: what a turn guards must therefore be safe, if
// slower, without it.
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
  std::thread::id holder_ ABSL_GUARDED_BY(mu_);  // none: nobody
};

extern constinit thread_local int turns_of_this_thread;  // of any

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
  bool has_it_ = false;  // else it is an inner turn, or one of another thread's
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_TURN_H_
