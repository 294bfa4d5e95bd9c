// Counts the host memory that arithmetic on the host reads and writes, for devices whose time is
// modelled.
//
//   sum.add_(gradient);
//   CountHostArithmetic(3 * sum.nbytes());   // two tensors are read, one is written
//
// At the next call of a device, an emulated machine takes the calling thread's count. It advances
// the host's clock by the time that all cores need for these bytes. Other devices ignore the count.
//
// Thread safety: each thread has a count of its own.

#ifndef PINION_DEVICE_HOST_ARITHMETIC_H_
#define PINION_DEVICE_HOST_ARITHMETIC_H_

#include <cstdint>

namespace pinion {

void CountHostArithmetic(uint64_t memory_bytes);

// Returns what the calling thread has counted since the last call, for the emulated machine.
uint64_t TakeHostArithmetic();

}  // namespace pinion

#endif  // PINION_DEVICE_HOST_ARITHMETIC_H_
