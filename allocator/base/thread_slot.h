// A small number for each thread that runs: an index into arrays of what is kept per thread.
//
//   arenas_[ThreadSlot()]
//
// A thread has its number from the first call until it ends; the next thread that asks may get it
// then, and what the last one did with what the number stands for happened before.
//
// A thread that asks for the first time in the last round of its keys' destructors
// (PTHREAD_DESTRUCTOR_ITERATIONS) keeps its number for ever: its end is not noticed any more.
//
// Thread safety: thread-safe. In a child of fork() the threads that it does not have keep theirs.

#ifndef PINION_ALLOCATOR_BASE_THREAD_SLOT_H_
#define PINION_ALLOCATOR_BASE_THREAD_SLOT_H_

namespace pinion {

inline constexpr int kThreadSlots = 64;

// What ThreadSlot() returns where all numbers are taken, to as many threads as ask.
inline constexpr int kNoThreadSlot = kThreadSlots;

namespace internal {
inline constexpr int kThreadSlotUnknown = -1;
extern constinit thread_local int thread_slot;
int TakeThreadSlot();
}  // namespace internal

// From 0 to kThreadSlots, the last one being kNoThreadSlot.
inline int ThreadSlot() {
  const int slot = internal::thread_slot;
  return slot == internal::kThreadSlotUnknown ? internal::TakeThreadSlot() : slot;
}

// The same, or kNoThreadSlot where this thread has not asked before: takes none.
inline int ThreadSlotIfAny() {
  const int slot = internal::thread_slot;
  return slot == internal::kThreadSlotUnknown ? kNoThreadSlot : slot;
}

}  // namespace pinion

#endif  // PINION_ALLOCATOR_BASE_THREAD_SLOT_H_
