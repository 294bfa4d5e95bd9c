// Which objects stay on the device while a pass over more than the window holds is repeated.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/engine/schedule/weight_prefetcher.h"

namespace pinion {
namespace {

using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

LoopPlan LoopOf(const std::vector<uint64_t>& sizes_bytes, uint64_t window_bytes) {
  std::vector<SizedObject> round;
  for (const uint64_t size_bytes : sizes_bytes) {
    round.push_back({static_cast<uint32_t>(round.size()), size_bytes});
  }
  return PlanLoop(round, window_bytes);
}

std::vector<uint32_t> Resident(const std::vector<uint64_t>& sizes_bytes, uint64_t window_bytes) {
  return LoopOf(sizes_bytes, window_bytes).stay;
}

TEST(LoopPlan, NothingStaysByNameWhereAllFitOrNothingHasRoom) {
  const std::vector<uint64_t> sizes(8, 10);
  for (const uint64_t window : {10, 20, 80, 100}) {
    EXPECT_THAT(Resident(sizes, window), IsEmpty()) << window;
  }
}

TEST(LoopPlan, AShareIsSpreadOverTheRoundBesideTheTwoLargest) {
  const std::vector<uint32_t> stay = Resident(std::vector<uint64_t>(8, 10), 40);
  ASSERT_THAT(stay, SizeIs(2));
  EXPECT_EQ(stay[1] - stay[0], 4u) << "half a round apart";
}

TEST(LoopPlan, MovesOnWhereObjectsOfOneSizeHaveRoomForHalfOfThemBesideTwo) {
  EXPECT_FALSE(LoopOf(std::vector<uint64_t>(8, 10), 59).moves_on());
  const LoopPlan loop = LoopOf(std::vector<uint64_t>(12, 10), 90);
  EXPECT_EQ(loop.stay.size(), 8u) << "beside one";
  EXPECT_EQ(loop.most_ahead_bytes, 40u) << "four of twelve are streamed: three uses ahead";
  std::vector<uint64_t> sizes(12, 10);
  sizes.front() = 60;
  EXPECT_FALSE(LoopOf(sizes, 140).moves_on()) << "one is much larger";
}

TEST(LoopPlan, TheLargestStayWithAShareOfTheOthersBesideThreeOfThose) {
  const std::vector<uint32_t> stay = Resident({60, 10, 10, 10, 10, 10, 10, 60}, 170);
  ASSERT_THAT(stay, SizeIs(4)) << "120 of the largest, and 170 - 120 - 30 of others";
  EXPECT_EQ(stay[0], 0u);
  EXPECT_EQ(stay[1], 7u);
  EXPECT_EQ(stay[3] - stay[2], 3u) << "half of the others apart";
}

TEST(LoopPlan, OneLargestStaysWhereTwoHaveNoRoom) {
  EXPECT_THAT(Resident({60, 10, 10, 10, 10, 10, 10, 50}, 105), IsEmpty())
      << "60, 50 and two more do not fit";
  EXPECT_THAT(Resident({60, 50, 10, 10, 10, 10, 10, 10}, 145), UnorderedElementsAre(0, 1));
}

TEST(LoopPlan, ObjectsOfOneSizeAreLargeTogetherOrNotAtAll) {
  const std::vector<uint64_t> sizes = {80, 10, 10, 60, 10, 10, 60, 10, 10, 60, 10, 10};
  constexpr uint64_t kLargestFits = 80 + 3 * 60, kAllLargeFit = kLargestFits + 3 * 10;
  for (uint64_t window = 90; window < 340; ++window) {
    const std::vector<uint32_t> stay = Resident(sizes, window);
    const auto stays = [&](uint32_t n) { return std::count(stay.begin(), stay.end(), n); };
    if (window > kAllLargeFit) {
      EXPECT_EQ(stays(3) + stays(6) + stays(9), 3) << window;
    } else if (window <= kLargestFits) {
      EXPECT_LT(stays(3) + stays(6) + stays(9), 3) << window;
    }
  }
}

TEST(LoopPlan, WhatStaysLeavesRoomForWhatComesAndGoes) {
  const std::vector<uint64_t> sizes = {4, 16, 7, 64, 3, 3, 64, 16, 9, 256, 5, 1};
  for (uint64_t window = 1; window < 448; ++window) {
    uint64_t stay_bytes = 0, streamed_bytes = 0;
    std::vector<bool> stays(sizes.size());
    for (const uint32_t object : Resident(sizes, window)) {
      EXPECT_FALSE(stays[object]) << object << " stays twice, window " << window;
      stays[object] = true;
      stay_bytes += sizes[object];
    }
    if (stay_bytes == 0) continue;
    for (size_t object = 0; object < sizes.size(); ++object) {
      if (!stays[object]) streamed_bytes = std::max(streamed_bytes, sizes[object]);
    }
    EXPECT_LE(stay_bytes + streamed_bytes, window);
  }
}

}  // namespace
}  // namespace pinion
