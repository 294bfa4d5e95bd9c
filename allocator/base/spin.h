// Pauses with exponential back-off, before a thread that waits for another one sleeps.
//
//   for (Spin spin; spin.Again();) {
//     if (IsFree()) return;
//   }
//   ... sleep ...
//
// Thread safety: none.

#ifndef PINION_ALLOCATOR_BASE_SPIN_H_
#define PINION_ALLOCATOR_BASE_SPIN_H_

namespace pinion {

class Spin {
 public:
  // Pauses and returns true, or returns false if it is time to sleep.
  bool Again();

 private:
  int looks_ = 0;
  int pauses_ = 0;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_BASE_SPIN_H_
