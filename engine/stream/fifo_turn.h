// Threads take turns in the order in which they came.
//
// A turn is not a mutex: device calls are made while it is held, so it must never be taken by
// anything that a device call could run into. Nothing else is held or waited for with it except
// what the device does, and a copy lane's turn of those who wait for room, which is taken before
// the timeline's.
//
//   FifoTurn::Scope turn(timeline->turn());
//
// Thread safety: thread-safe.

#ifndef PINION_ENGINE_STREAM_FIFO_TURN_H_
#define PINION_ENGINE_STREAM_FIFO_TURN_H_

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "pinion/allocator/base/mutex.h"

namespace pinion::internal {

class FifoTurn {
 public:
  class Scope {
   public:
    explicit Scope(FifoTurn& turn) : turn_(turn) { turn_.Enter(); }
    ~Scope() { turn_.Leave(); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    FifoTurn& turn_;
  };

 private:
  void Enter() {
    MutexLock lock(mu_);
    const uint64_t mine = next_++;
    while (serving_ != mine) changed_.Wait(mu_);
  }
  void Leave() {
    MutexLock lock(mu_);
    ++serving_;
    changed_.NotifyAll();
  }

  Mutex mu_;
  CondVar changed_;
  uint64_t next_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t serving_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace pinion::internal

#endif  // PINION_ENGINE_STREAM_FIFO_TURN_H_
