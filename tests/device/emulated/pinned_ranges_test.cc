#include "pinion/device/emulated/pinned_ranges.h"

#include <array>

#include "gtest/gtest.h"
#include "pinion/device/emulated/engines.h"

namespace pinion {
namespace {

using Overlap = PinnedRanges::Overlap;

class PinnedRangesTest : public ::testing::Test {
 protected:
  PinnedRangesTest() { ranges_.Add(&bytes_[100], 50); }

  EmulatedOptions options_;
  Simulation simulation_{options_, /*trace=*/nullptr};
  PinnedRanges ranges_{&simulation_};
  std::array<char, 256> bytes_ = {};
};

TEST_F(PinnedRangesTest, SaysHowBytesLieToWhatIsPinned) {
  EXPECT_EQ(ranges_.Find(&bytes_[100], 50), Overlap::kInside);
  EXPECT_EQ(ranges_.Find(&bytes_[149], 1), Overlap::kInside);
  EXPECT_EQ(ranges_.Find(&bytes_[99], 2), Overlap::kPartly);
  EXPECT_EQ(ranges_.Find(&bytes_[149], 2), Overlap::kPartly);
  EXPECT_EQ(ranges_.Find(&bytes_[99], 1), Overlap::kNone);
  EXPECT_EQ(ranges_.Find(&bytes_[150], 1), Overlap::kNone);
  ranges_.Add(&bytes_[150], 50);
  EXPECT_EQ(ranges_.Find(&bytes_[140], 20), Overlap::kPartly) << "two neighbours are not one range";
}

TEST_F(PinnedRangesTest, ARangeIsKnownByItsBeginning) {
  EXPECT_EQ(ranges_.SizeAt(&bytes_[100]), 50u);
  EXPECT_EQ(ranges_.SizeAt(&bytes_[101]), 0u);
}

}  // namespace
}  // namespace pinion
