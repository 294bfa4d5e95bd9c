// Bytes that betray a copy that did not happen, went to the wrong place or changed on the way.
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

  // Writes, or compares, the bytes that stand at `offset_bytes` of the endless pattern; offsets are
  // multiples of 64 KiB.
  void Fill(void* data, uint64_t offset_bytes, uint64_t size_bytes) const;
  // The first byte that differs, counted from `data`; nothing where all are as they should be.
  std::optional<uint64_t> FirstDifference(const void* data, uint64_t offset_bytes,
                                          uint64_t size_bytes) const;

 private:
  std::vector<uint64_t> tile_;
};

}  // namespace pinion

#endif  // PINION_BENCH_TEST_PATTERN_H_
