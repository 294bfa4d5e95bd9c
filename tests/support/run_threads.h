// Runs a function on several threads that start together.
//
//   RunThreads(8, [&](int thread) { ... });   // returns when all are done

#ifndef PINION_TESTS_SUPPORT_RUN_THREADS_H_
#define PINION_TESTS_SUPPORT_RUN_THREADS_H_

#include <barrier>
#include <functional>
#include <thread>
#include <vector>

namespace pinion::testing {

inline void RunThreads(int count, const std::function<void(int thread)>& body) {
  std::barrier start(count);
  std::vector<std::thread> threads;
  threads.reserve(count);
  for (int i = 0; i < count; ++i) {
    threads.emplace_back([&, i] {
      start.arrive_and_wait();
      body(i);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_RUN_THREADS_H_
