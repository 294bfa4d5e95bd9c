// A small number for each running thread, to index arrays of per-thread data.
//
//   arenas_[ThreadSlot()]
//
// A thread keeps its number from the first call until it ends. Then another thread may get the
// number. All that the previous owner did happened before.
//
// Exception: a thread that first asks in its last round of key destructors
// (PTHREAD_DESTRUCTOR_ITERATIONS) keeps the number for ever.
//
// Thread safety: thread-safe. In a child of fork(), the numbers of the parent's other threads stay
// taken.

#ifndef PINION_ALLOCATOR_BASE_THREAD_SLOT_H_
#define PINION_ALLOCATOR_BASE_THREAD_SLOT_H_

namespace pinion {

inline constexpr int kThreadSlots = 64;

// Returned by ThreadSlot() to all threads that find every number taken.
inline constexpr int kNoThreadSlot = kThreadSlots;

namespace internal {
inline constexpr int kThreadSlotUnknown = -1;
extern constinit thread_local int thread_slot;
int TakeThreadSlot();
}  // namespace internal

// Returns a number below kThreadSlots, or kNoThreadSlot.
inline int ThreadSlot() {
  const int slot = internal::thread_slot;
  return slot == internal::kThreadSlotUnknown ? internal::TakeThreadSlot() : slot;
}

// Returns this thread's number, or kNoThreadSlot if it has none yet.
inline int ThreadSlotIfAny() {
  const int slot = internal::thread_slot;
  return slot == internal::kThreadSlotUnknown ? kNoThreadSlot : slot;
}

}  // namespace pinion

#endif  // PINION_ALLOCATOR_BASE_THREAD_SLOT_H_
