#include "pinion/allocator/base/mutex.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace pinion {
namespace {

// Number of looks, and pauses before the first look; they double up to the maximum. Most critical
// sections are short. A longer one is usually a burst of allocations from warm cache lines, which
// to take the lock in between would slow down.
constexpr int kLooks = 20;
constexpr int kFirstPauses = 4;
constexpr int kMostPauses = 80;

constexpr std::chrono::microseconds kSleep(50);

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

}  // namespace

bool Spin::Again() {
  if (looks_ == kLooks) return false;
  ++looks_;
  pauses_ = pauses_ == 0 ? kFirstPauses : std::min(2 * pauses_, kMostPauses);
  for (int i = 0; i < pauses_; ++i) Pause();
  return true;
}

void Spin::Wait() {
  if (!Again()) std::this_thread::sleep_for(kSleep);
}

void Mutex::LockSlowly() {
  for (Spin spin; spin.Again();) {
    if (state_.load(std::memory_order_relaxed) == kFree && TakeIfFree()) return;
  }
  while (state_.exchange(kContended, std::memory_order_acquire) != kFree) {
    state_.wait(kContended, std::memory_order_relaxed);
  }
}

}  // namespace pinion
