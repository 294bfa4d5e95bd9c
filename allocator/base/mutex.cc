#include "pinion/allocator/base/mutex.h"

#include <atomic>

namespace pinion {
namespace {

// How often a held mutex is looked at before the thread sleeps, and how long it waits in between.
// Not at every moment: whoever holds it does dozens of allocations with what is in its cache in the
// time that the first one takes on another processor.
constexpr int kLooks = 20;
constexpr int kPausesBetweenLooks = 80;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

}  // namespace

void Mutex::LockSlowly() {
  for (int look = 0; look < kLooks; ++look) {
    for (int i = 0; i < kPausesBetweenLooks; ++i) Pause();
    if (state_.load(std::memory_order_relaxed) == kFree && TakeIfFree()) return;
  }
  while (state_.exchange(kContended, std::memory_order_acquire) != kFree) {
    state_.wait(kContended, std::memory_order_relaxed);
  }
}

}  // namespace pinion
