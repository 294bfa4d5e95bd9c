#include "pinion/device/emulated/pinned_ranges.h"

#include <array>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "pinion/device/emulated/engines.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;
using Overlap = PinnedRanges::Overlap;

class PinnedRangesTest : public ::testing::Test {
 protected:
  PinnedRangesTest() {
    options_.abort_on_race = false;
    ranges_.Add(&bytes_[100], 50);
  }

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
}

TEST_F(PinnedRangesTest, TwoNeighboursAreNotOneRange) {
  ranges_.Add(&bytes_[150], 50);
  EXPECT_EQ(ranges_.Find(&bytes_[140], 20), Overlap::kPartly);
}

TEST_F(PinnedRangesTest, ARangeIsKnownByItsBeginning) {
  EXPECT_EQ(ranges_.SizeAt(&bytes_[100]), 50u);
  EXPECT_EQ(ranges_.SizeAt(&bytes_[101]), 0u);
}

TEST_F(PinnedRangesTest, RemovingWaitsForTheCopiesOfAllStreams) {
  const int slot = simulation_.AddStream(0, "emu:0/d2h");
  CopyCost cost;
  cost.direction = CopyDirection::kDeviceToHost;
  cost.size_bytes = 1;
  cost.latency_ms = 3;
  bytes_[0] = 'x';
  simulation_.SubmitCopy(slot, "copy D2H", {{&bytes_[100], &bytes_[0], 1}}, cost);
  EXPECT_THAT(ranges_.Remove(&bytes_[100]), IsOk());
  EXPECT_GE(simulation_.time().now_ms(), 3);
  EXPECT_EQ(bytes_[100], 'x');
  EXPECT_EQ(ranges_.SizeAt(&bytes_[100]), 0u);
  EXPECT_EQ(simulation_.races().size(), 1u) << "waiting orders nothing";
}

TEST_F(PinnedRangesTest, ARangeThatAStuckCopyMayUseStays) {
  const int slot = simulation_.AddStream(0, "emu:0/d2h");
  CopyCost cost;
  cost.latency_ms = kForever;
  simulation_.SubmitCopy(slot, "copy H2D", {{&bytes_[0], &bytes_[100], 1}}, cost);
  EXPECT_THAT(ranges_.Remove(&bytes_[100]), StatusIs(absl::StatusCode::kUnavailable));
  EXPECT_EQ(ranges_.SizeAt(&bytes_[100]), 50u);
}

}  // namespace
}  // namespace pinion
