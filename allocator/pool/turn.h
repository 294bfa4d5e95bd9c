// A section that one thread at a time is in, for long work that many threads may want done at once:
// whoever has the turn looks first whether another thread has done the work meanwhile.
//
//   const TurnHolder mine(turn_);
//   if (AlreadyDone()) return;
//   ...
//
// A turn is re-entrant: the work calls the operating system and the user's callbacks, which may
// come back to the allocator on the same thread. Therefore it is not a Mutex.
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

class TurnHolder {
 public:
  explicit TurnHolder(Turn& turn) : turn_(turn) {
    MutexLock lock(turn_.mu_);
    again_ = turn_.holder_ == std::this_thread::get_id();
    while (!again_ && turn_.holder_ != std::thread::id()) turn_.ended_.Wait(turn_.mu_);
    turn_.holder_ = std::this_thread::get_id();
  }
  ~TurnHolder() {
    if (again_) return;
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
  bool again_ = false;  // it is an inner turn
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_POOL_TURN_H_
