// Pauses with exponential back-off, for a thread that waits for another one.
//
//   for (Spin spin; spin.Again();) {
//     if (IsFree()) return;
//   }
//   ... sleep until notified ...
//
//   for (Spin spin; !IsDone();) spin.Wait();      // where nobody notifies
//
// Thread safety: none.

#ifndef PINION_ALLOCATOR_BASE_SPIN_H_
#define PINION_ALLOCATOR_BASE_SPIN_H_

namespace pinion {

class Spin {
 public:
  // Pauses and returns true, or returns false if it is time to sleep.
  bool Again();

  // Pauses, or sleeps if it is time to. Only sleeping gives the processor to a thread of lower
  // priority.
  void Wait();

 private:
  int looks_ = 0;
  int pauses_ = 0;
};

}  // namespace pinion

#endif  // PINION_ALLOCATOR_BASE_SPIN_H_
