// Sizes in bytes: constants, rounding, and readable text.

#ifndef PINION_ALLOCATOR_BASE_BYTES_H_
#define PINION_ALLOCATOR_BASE_BYTES_H_

#include <cstdint>
#include <string>

namespace pinion {

inline constexpr uint64_t kKiB = uint64_t{1} << 10;
inline constexpr uint64_t kMiB = uint64_t{1} << 20;
inline constexpr uint64_t kGiB = uint64_t{1} << 30;

constexpr bool IsPowerOfTwo(uint64_t value) { return value != 0 && (value & (value - 1)) == 0; }

// Returns the smallest multiple of `alignment` (a power of two) that is at least `value`. The
// result must fit 64 bits.
constexpr uint64_t AlignUp(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) & ~(alignment - 1);
}

// Returns the largest multiple of `alignment` (a power of two) that is at most `value`.
constexpr uint64_t AlignDown(uint64_t value, uint64_t alignment) {
  return value & ~(alignment - 1);
}

// Returns "512 B", "1.5 KiB", "64 MiB": three significant digits, binary units.
std::string HumanBytes(uint64_t size_bytes);

}  // namespace pinion

#endif  // PINION_ALLOCATOR_BASE_BYTES_H_
