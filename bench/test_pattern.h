// Bytes that reveal a missing, misplaced or corrupt copy. Each seed makes other bytes, and each 64
// KiB of a seed's bytes are unique.
//
// Every seed makes other bytes, and every 64 KiB of a seed's bytes differ from all others of it.
//
// Thread safety: a TestPattern is immutable.

#ifndef PINION_BENCH_TEST_PATTERN_H_
#define PINION_BENCH_TEST_PATTERN_H_

#include <cstdint>
#include <optional>
#include <vector>

namespace pinion {

class TestPattern {
 public:
  explicit TestPattern(uint64_t seed);

  // Writes or compares the endless pattern's bytes at `offset_bytes`, a multiple of 64 KiB.
  void Fill(void* data, uint64_t offset_bytes, uint64_t size_bytes) const;
  // Returns the index in `data` of the first byte that differs; nullopt if none does.
  std::optional<uint64_t> FirstDifference(const void* data, uint64_t offset_bytes,
                                          uint64_t size_bytes) const;

 private:
  std::vector<uint64_t> tile_;
};

}  // namespace pinion

#endif  // PINION_BENCH_TEST_PATTERN_H_
