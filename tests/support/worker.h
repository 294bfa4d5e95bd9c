// A thread that runs one function at a time while the caller waits. Several workers make a sequence
// of steps run on several threads in a fixed order.
//
//   Worker backward;
//   backward.Run([&] { block.reset(); });   // on its thread; returns when it is done
//
// Thread safety: one thread at a time may call Run.

#ifndef PINION_TESTS_SUPPORT_WORKER_H_
#define PINION_TESTS_SUPPORT_WORKER_H_

#include <chrono>
#include <functional>
#include <semaphore>
#include <thread>

#include "pinion/allocator/base/check.h"

namespace pinion::testing {

class Worker {
 public:
  Worker() = default;
  ~Worker() {
    work_ = nullptr;
    begun_.release();
    thread_.join();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  void Run(const std::function<void()>& work) {
    work_ = &work;
    begun_.release();
    // Turns a hang into a failure.
    PINION_CHECK(done_.try_acquire_for(std::chrono::minutes(2))) << "the work does not end";
  }

 private:
  void Loop() {
    while (true) {
      begun_.acquire();
      if (work_ == nullptr) return;
      (*work_)();
      done_.release();
    }
  }

  const std::function<void()>* work_ = nullptr;
  std::binary_semaphore begun_{0};
  std::binary_semaphore done_{0};
  std::thread thread_{[this] { Loop(); }};
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_WORKER_H_
