#include "pinion/allocator/base/mutex.h"

#include "pinion/allocator/base/spin.h"

namespace pinion {

void Mutex::LockSlowly() {
  for (Spin spin; spin.Again();) {
    if (state_.load(std::memory_order_relaxed) == kFree && TakeIfFree()) return;
  }
  while (state_.exchange(kContended, std::memory_order_acquire) != kFree) {
    state_.wait(kContended, std::memory_order_relaxed);
  }
}

}  // namespace pinion
