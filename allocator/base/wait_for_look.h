// A back-off for polling a condition that another thread is about to make true.
//
//   for (int looks = 0; !IsDone(); ++looks) WaitForLook(looks);
//
// It does not wait at first, then yields, and then sleeps. Only sleeping gives the processor to a
// thread of lower priority.
//
// Thread safety: thread-safe.

#ifndef PINION_ALLOCATOR_BASE_WAIT_FOR_LOOK_H_
#define PINION_ALLOCATOR_BASE_WAIT_FOR_LOOK_H_

namespace pinion {

// Waits as long as it takes after `looks` unsuccessful looks.
void WaitForLook(int looks);

}  // namespace pinion

#endif  // PINION_ALLOCATOR_BASE_WAIT_FOR_LOOK_H_
