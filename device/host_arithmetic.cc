#include "pinion/device/host_arithmetic.h"

#include <utility>

namespace pinion {
namespace {

thread_local uint64_t counted_bytes = 0;

}  // namespace

void CountHostArithmetic(uint64_t memory_bytes) { counted_bytes += memory_bytes; }

uint64_t TakeHostArithmetic() { return std::exchange(counted_bytes, 0); }

}  // namespace pinion
