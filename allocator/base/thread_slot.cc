#include "pinion/allocator/base/thread_slot.h"

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace pinion::internal {

constinit thread_local int thread_slot = kThreadSlotUnknown;

namespace {

constinit std::array<std::atomic<bool>, kThreadSlots> taken = {};

// A key of its own, and no thread_local with a destructor: the latter keeps a library that was
// loaded with dlopen() in the process until every thread that used it has ended.
class EndOfThreads {
 public:
  EndOfThreads() { usable_ = pthread_key_create(&key_, &GiveBack) == 0; }
  ~EndOfThreads() {
    // First, for threads that go on: the number of a key may be given again. One that has just
    // looked may still use it.
    if (usable_.exchange(false)) pthread_key_delete(key_);
  }

  // False if the end of this thread would not be noticed.
  bool Notice(int slot) {
    return usable_ &&
           pthread_setspecific(key_, reinterpret_cast<void*>(static_cast<intptr_t>(slot) + 1)) == 0;
  }

 private:
  static void GiveBack(void* slot_and_one) {
    thread_slot = kThreadSlotUnknown;
    taken[reinterpret_cast<intptr_t>(slot_and_one) - 1].store(false, std::memory_order_release);
  }

  pthread_key_t key_ = {};
  std::atomic<bool> usable_ = false;
};

// While the library is loaded. Threads that outlive it, or ask before it, get no number.
EndOfThreads end_of_threads;

}  // namespace

int TakeThreadSlot() {
  for (int slot = 0; slot < kThreadSlots; ++slot) {
    if (taken[slot].load(std::memory_order_relaxed)) continue;
    if (taken[slot].exchange(true, std::memory_order_acquire)) continue;
    if (!end_of_threads.Notice(slot)) {
      taken[slot].store(false, std::memory_order_release);
      return kNoThreadSlot;
    }
    return thread_slot = slot;
  }
  return kNoThreadSlot;
}

}  // namespace pinion::internal
