// A thread whose sleep in a lock or condition variable a test can await. The kernel reports the
// sleep, so the test needs no delay of its own.
//
//   SleepingThread waiter([&] { parcel->ReadOrClaim(reader); });
//   waiter.AwaitSleep();     // returns once only a wake-up can continue it
//   ...
//   waiter.Join();

#ifndef PINION_TESTS_ENGINE_TIER_SLEEPING_THREAD_H_
#define PINION_TESTS_ENGINE_TIER_SLEEPING_THREAD_H_

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace pinion::testing {

class SleepingThread {
 public:
  // `body` must not block anywhere except in the tested call.
  explicit SleepingThread(std::function<void()> body)
      : thread_([this, body = std::move(body)] {
          id_ = syscall(SYS_gettid);
          body();
          done_ = true;
        }) {}
  ~SleepingThread() { Join(); }

  // Also returns if `body` has returned.
  void AwaitSleep() const {
    while (!done_ && !Sleeps()) absl::SleepFor(absl::Microseconds(20));
  }
  bool done() const { return done_; }
  void Join() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  // The state follows the name, which is in parentheses.
  bool Sleeps() const {
    if (id_ == 0) return false;
    std::ifstream file("/proc/self/task/" + std::to_string(id_) + "/stat");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const size_t name_end = text.rfind(") ");
    return name_end != std::string::npos && text[name_end + 2] == 'S';
  }

  std::atomic<long> id_{0};
  std::atomic<bool> done_{false};
  std::thread thread_;
};

}  // namespace pinion::testing

#endif  // PINION_TESTS_ENGINE_TIER_SLEEPING_THREAD_H_
