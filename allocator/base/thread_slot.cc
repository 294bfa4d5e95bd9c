#include "pinion/allocator/base/thread_slot.h"

#include <pthread.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace pinion::internal {

constinit thread_local int thread_slot = kThreadSlotUnknown;

namespace {

constinit std::array<std::atomic<bool>, kThreadSlots> taken = {};

// A pthread key, because a thread_local with a destructor would keep a library that was loaded by
// dlopen() until every thread that used it has ended.
class EndOfThreads {
 public:
  EndOfThreads() { usable_ = pthread_key_create(&key_, &GiveBack) == 0; }
  ~EndOfThreads() {
    // Cleared before the key is deleted, because its number may be reused. A thread that has just
    // read the flag may still use the key.
    if (usable_.exchange(false)) pthread_key_delete(key_);
  }

  // Returns false if the end of this thread cannot be noticed.
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

// Threads that outlive the loaded library, or ask before it is loaded, get no number.
EndOfThreads end_of_threads;

}  // namespace

// kNoThreadSlot is never stored in thread_slot: a thread without a number must not be taken for the
// owner of an arena of such threads.
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
