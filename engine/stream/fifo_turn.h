// A ticket lock: threads enter in order of arrival. Unlike a mutex, it is held across device calls.
//
//   FifoTurn::Scope turn(timeline->turn());
//
// So code that a device call may run into must never take it. While holding it, wait for nothing
// else but the device. Exception: a CopyLane's room turn is taken before its timeline's turn.
//
// Thread safety: thread-safe.

#ifndef PINION_ENGINE_STREAM_FIFO_TURN_H_
#define PINION_ENGINE_STREAM_FIFO_TURN_H_

#include <atomic>

#include "pinion/allocator/base/spin.h"

namespace pinion::internal {

class FifoTurn {
 public:
  class [[nodiscard]] Scope {
   public:
    [[nodiscard]] explicit Scope(FifoTurn& turn) : turn_(turn) { turn_.Enter(); }
    ~Scope() { turn_.Leave(); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    FifoTurn& turn_;
  };

 private:
  void Enter() {
    const int mine = next_.fetch_add(1, std::memory_order_relaxed);
    // The next thread spins first: most turns are a few device calls, each of which only enqueues.
    const bool is_next = mine - serving_.load(std::memory_order_acquire) <= 1;
    for (Spin spin; is_next && serving_.load(std::memory_order_acquire) != mine && spin.Again();) {
    }
    for (int serving; (serving = serving_.load(std::memory_order_acquire)) != mine;) {
      serving_.wait(serving, std::memory_order_acquire);
    }
  }
  void Leave() {
    serving_.fetch_add(1);
    serving_.notify_all();
  }

  // Ticket numbers; they may wrap around.
  std::atomic<int> next_ = 0;
  std::atomic<int> serving_ = 0;
};

}  // namespace pinion::internal

#endif  // PINION_ENGINE_STREAM_FIFO_TURN_H_
