#include "pinion/allocator/base/bytes.h"

#include <cstdint>

#include "gtest/gtest.h"

namespace pinion {
namespace {

TEST(BytesTest, SizesAreReadableWithThreeDigits) {
  EXPECT_EQ(HumanBytes(0), "0 B");
  EXPECT_EQ(HumanBytes(999), "999 B");
  EXPECT_EQ(HumanBytes(1000), "0.977 KiB");
  EXPECT_EQ(HumanBytes(1536), "1.5 KiB");
  EXPECT_EQ(HumanBytes(kMiB), "1 MiB");
  EXPECT_EQ(HumanBytes(3 * kGiB), "3 GiB");
  EXPECT_EQ(HumanBytes(uint64_t{1} << 60), "1 EiB");
  EXPECT_EQ(HumanBytes(UINT64_MAX), "16 EiB");
}

TEST(BytesTest, ZeroIsNoPowerOfTwo) {
  uint64_t value = 0;
  EXPECT_FALSE(IsPowerOfTwo(value));
  for (value = 1; value != 0; value <<= 1) EXPECT_TRUE(IsPowerOfTwo(value)) << value;
  for (value = 3; value < (uint64_t{1} << 62); value <<= 1) EXPECT_FALSE(IsPowerOfTwo(value));
}

TEST(BytesTest, AlignedIsTheNearestMultipleAboveOrBelow) {
  for (uint64_t value = 0; value < 20; ++value) {
    EXPECT_EQ(AlignUp(value, 4), (value + 3) / 4 * 4);
    EXPECT_EQ(AlignDown(value, 4), value / 4 * 4);
    EXPECT_EQ(AlignUp(value, 1), value);
  }
}

}  // namespace
}  // namespace pinion
