// Pauses between one look and the next at what another thread will soon change, before the thread
// sleeps: each pause is longer than the one before.
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
  // Pauses; false, and no pause: it was often enough.
  bool Again();

 private:
  int looks_ = 0;
  int pauses_ = 0;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_BASE_SPIN_H_
