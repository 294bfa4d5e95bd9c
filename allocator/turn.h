// Who may do something that takes long and is to be done once: others wait, and then look whether
// it is still to be done.
//
//   const TurnHolder mine(turn_);
//   if (mine.waited() && AlreadyDone()) return;
//   ...
//
// Not a Mutex: what is done meanwhile calls the operating system, and may come back to take the
// turn again, on the same thread.
//
// Thread safety: thread-safe.

#ifndef PINION_ALLOCATOR_TURN_H_
#define PINION_ALLOCATOR_TURN_H_

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
    while (!again_ && turn_.holder_ != std::thread::id()) {
      waited_ = true;
      turn_.ended_.Wait(turn_.mu_);
    }
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

  // Another thread had it first.
  bool waited() const { return waited_; }

 private:
  Turn& turn_;
  bool again_ = false;
  bool waited_ = false;
};

}  // namespace pinion::internal

#endif  // PINION_ALLOCATOR_TURN_H_
