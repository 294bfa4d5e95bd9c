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
    // Who is next looks for a while first: many turns are some device calls long, each of which
    // only enqueues.
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

  // Numbers of turns; they may wrap around.
  std::atomic<int> next_ = 0;
  std::atomic<int> serving_ = 0;
};

}  // namespace pinion::internal

#endif  // PINION_ENGINE_STREAM_FIFO_TURN_H_
