// Bytes that reveal a missing, misplaced or corrupt copy. Each seed makes other bytes, and each 64
// KiB of a seed's bytes are unique.
//
// Thread safety: a TestPattern is immutable.

#ifndef PINION_BENCH_TEST_PATTERN_H_
#define PINION_BENCH_TEST_PATTERN_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include "pinion/allocator/base/bytes.h"
#include "pinion/allocator/base/check.h"

namespace pinion {

class TestPattern {
 public:
  explicit TestPattern(uint64_t seed) : tile_(kTileBytes / sizeof(uint64_t)) {
    std::mt19937_64 random(seed);
    std::generate(tile_.begin(), tile_.end(), [&random] { return random(); });
  }

  // Writes or compares the endless pattern's bytes at `offset_bytes`, a multiple of 64 KiB.
  void Fill(void* data, uint64_t offset_bytes, uint64_t size_bytes) const {
    PINION_CHECK(offset_bytes % kTileBytes == 0) << offset_bytes;
    char* const bytes = static_cast<char*>(data);
    for (uint64_t done = 0; done < size_bytes; done += kTileBytes) {
      const uint64_t stamp = Stamp(offset_bytes + done);
      const uint64_t part = std::min(kTileBytes, size_bytes - done);
      std::memcpy(bytes + done, tile_.data(), part);
      std::memcpy(bytes + done, &stamp, std::min(sizeof(stamp), part));
    }
  }

  // Returns the index in `data` of the first byte that differs; nullopt if none does.
  std::optional<uint64_t> FirstDifference(const void* data, uint64_t offset_bytes,
                                          uint64_t size_bytes) const {
    PINION_CHECK(offset_bytes % kTileBytes == 0) << offset_bytes;
    const char* const bytes = static_cast<const char*>(data);
    std::vector<uint64_t> tile = tile_;
    const char* const expected = reinterpret_cast<const char*>(tile.data());
    for (uint64_t done = 0; done < size_bytes; done += kTileBytes) {
      tile[0] = Stamp(offset_bytes + done);
      const uint64_t part = std::min(kTileBytes, size_bytes - done);
      if (std::memcmp(bytes + done, expected, part) == 0) continue;
      return done + (std::mismatch(expected, expected + part, bytes + done).first - expected);
    }
    return std::nullopt;
  }

 private:
  static constexpr uint64_t kTileBytes = 64 * kKiB;

  // Returns the first word of the tile at `offset_bytes`.
  uint64_t Stamp(uint64_t offset_bytes) const { return tile_[0] ^ (offset_bytes / kTileBytes + 1); }

  std::vector<uint64_t> tile_;
};

}  // namespace pinion

#endif  // PINION_BENCH_TEST_PATTERN_H_
