// What a thread does that looks again and again for what another one is about to change.
//
//   for (int looks = 0; !IsDone(); ++looks) WaitForLook(looks);
//
// At first it looks at once; then it leaves the processor to others in between, and at last it
// sleeps: a thread of lower priority on the same processor gets it in no other way.
//
// Thread safety: thread-safe.

#ifndef PINION_ALLOCATOR_BASE_WAIT_FOR_LOOK_H_
#define PINION_ALLOCATOR_BASE_WAIT_FOR_LOOK_H_

namespace pinion {

// After so many looks, before the next one.
void WaitForLook(int looks);

}  // namespace pinion

#endif  // PINION_ALLOCATOR_BASE_WAIT_FOR_LOOK_H_
