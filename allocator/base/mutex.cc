#include "pinion/allocator/base/mutex.h"

#include <algorithm>
#include <atomic>

namespace pinion {
namespace {

// How often a held mutex is looked at before the thread sleeps, and how many pauses lie before the
// first look: twice as many before each next one, up to the most. Most holders are soon done. Who
// is not does dozens of allocations with what is in its cache, in the time that the first one takes
// on another processor.
constexpr int kLooks = 20;
constexpr int kFirstPauses = 4;
constexpr int kMostPauses = 80;

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

}  // namespace

void Mutex::LockSlowly() {
  int pauses = kFirstPauses;
  for (int look = 0; look < kLooks; ++look) {
    for (int i = 0; i < pauses; ++i) Pause();
    pauses = std::min(2 * pauses, kMostPauses);
    if (state_.load(std::memory_order_relaxed) == kFree && TakeIfFree()) return;
  }
  while (state_.exchange(kContended, std::memory_order_acquire) != kFree) {
    state_.wait(kContended, std::memory_order_relaxed);
  }
}

}  // namespace pinion
