// Sizes: constants, rounding, and text that people can read.

#ifndef PINION_ALLOCATOR_BASE_BYTES_H_
#define PINION_ALLOCATOR_BASE_BYTES_H_

#include <cstdint>
#include <string>

namespace pinion {

inline constexpr uint64_t kKiB = uint64_t{1} << 10;
inline constexpr uint64_t kMiB = uint64_t{1} << 20;
inline constexpr uint64_t kGiB = uint64_t{1} << 30;

constexpr bool IsPowerOfTwo(uint64_t value) { return value != 0 && (value & (value - 1)) == 0; }

// The smallest multiple of `alignment` (a power of two) that is not below `value`.
// The caller makes sure that it fits 64 bits.
constexpr uint64_t AlignUp(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) & ~(alignment - 1);
}

// The largest multiple of `alignment` (a power of two) that is not above `value`.
constexpr uint64_t AlignDown(uint64_t value, uint64_t alignment) {
  return value & ~(alignment - 1);
}

// "512 B", "1.5 KiB", "64 MiB", "2.25 GiB": three significant digits, binary units.
std::string HumanBytes(uint64_t size_bytes);

}  // namespace pinion

#endif  // PINION_ALLOCATOR_BASE_BYTES_H_
