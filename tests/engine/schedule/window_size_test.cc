#include <cstdint>
#include <initializer_list>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/engine/schedule/offload_schedule.h"

namespace pinion {
namespace {

ScopeSizes Saved(std::initializer_list<uint64_t> sizes) {
  ScopeSizes saved;
  for (const uint64_t size_bytes : sizes) saved.Add(size_bytes);
  return saved;
}

TEST(WindowSizeTest, HoldsTwoTensorsOfTheUsualSize) {
  EXPECT_EQ(AutoWindowBytes(Saved({5, 5, 5, 5, 5}), {}), 10u);
  EXPECT_EQ(AutoWindowBytes(Saved({1, 5, 2, 5, 3, 5, 4, 5}), {}), 10u);
}

// Float32 logits of 4 GB with activations of 64 MB: windows of 8 GB would free almost nothing.
TEST(WindowSizeTest, ThreeTensorsThatAreLargerThanAllOthersDoNotWidenIt) {
  EXPECT_EQ(AutoWindowBytes(Saved({5, 4000, 5, 4000, 5, 4000, 5}), {}), 10u);
  EXPECT_EQ(AutoWindowBytes(Saved({5, 4000, 5, 4000, 5, 4000, 5, 4000}), {}), 8000u);
}

TEST(WindowSizeTest, SmallTensorsBehindLargeOnesDoNotNarrowIt) {
  EXPECT_EQ(AutoWindowBytes(Saved({5, 5, 5, 5, 1, 2}), {}), 10u);
}

TEST(WindowSizeTest, FewTensorsAreNoneOfThemOutliers) {
  EXPECT_EQ(Saved({}).usual_bytes(), 0u);
  EXPECT_EQ(Saved({1}).usual_bytes(), 1u);
  EXPECT_EQ(Saved({7}).usual_bytes(), 7u);
  EXPECT_EQ(Saved({9, 7, 8}).usual_bytes(), 7u);
}

TEST(WindowSizeTest, TheLastScopeCountsToo) {
  EXPECT_EQ(AutoWindowBytes({}, Saved({5, 5, 5, 5})), 10u);
  EXPECT_EQ(AutoWindowBytes(Saved({3}), Saved({5, 5, 5, 5})), 10u);
  EXPECT_EQ(AutoWindowBytes(Saved({8}), Saved({5, 5, 5, 5})), 16u);
}

TEST(WindowSizeTest, ASixthOfASmallScopeIsHeldButNoMoreThan64KiB) {
  ScopeSizes many;
  for (int i = 0; i < 36; ++i) many.Add(kKiB);
  EXPECT_EQ(AutoWindowBytes({}, many), 6 * kKiB);
  for (int i = 0; i < 500; ++i) many.Add(kKiB);
  EXPECT_EQ(AutoWindowBytes({}, many), 64 * kKiB);
}

TEST(WindowSizeTest, ASixteenthOfALargeScopeIsHeldButNoMoreThan256MiB) {
  ScopeSizes many;
  for (int i = 0; i < 320; ++i) many.Add(kMiB);
  EXPECT_EQ(AutoWindowBytes({}, many), 20 * kMiB);
  for (int i = 0; i < 32000; ++i) many.Add(kMiB);
  EXPECT_EQ(AutoWindowBytes({}, many), 256 * kMiB);
}

}  // namespace
}  // namespace pinion
