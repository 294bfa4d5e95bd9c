// Ways to run the rounds of a loop within a window, and when they are tried again.

#include "pinion/engine/schedule/visit_loop.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace pinion {
namespace {

using ::testing::ElementsAre;
using ::testing::UnorderedElementsAre;
using Kind = VisitLoop::Kind;

std::vector<VisitLoop> LoopsOf(const std::vector<uint64_t>& sizes_bytes, uint64_t window_bytes) {
  std::vector<SizedObject> round;
  for (const uint64_t size_bytes : sizes_bytes) {
    round.push_back({static_cast<uint32_t>(round.size()), size_bytes});
  }
  return LoopsWithin(round, window_bytes);
}

std::vector<Kind> KindsOf(const std::vector<VisitLoop>& loops) {
  std::vector<Kind> kinds;
  for (const VisitLoop& loop : loops) kinds.push_back(loop.kind);
  return kinds;
}

TEST(VisitLoop, NothingStaysByNameWhereAllFitOrNothingHasRoom) {
  const std::vector<uint64_t> sizes(8, 10);
  for (const uint64_t window : {10, 20, 80, 100}) {
    EXPECT_THAT(KindsOf(LoopsOf(sizes, window)), ElementsAre(Kind::kNoneStays)) << window;
  }
}

TEST(VisitLoop, AShareStaysSpreadOverTheRoundBesideTheTwoLargest) {
  const std::vector<VisitLoop> loops = LoopsOf(std::vector<uint64_t>(8, 10), 40);
  ASSERT_THAT(KindsOf(loops), ElementsAre(Kind::kNoneStays, Kind::kShareStays));
  EXPECT_EQ(loops[1].stay.size(), 2u);
  EXPECT_EQ(loops[1].stay[1] - loops[1].stay[0], 4u) << "half a round apart";
}

TEST(VisitLoop, AllMayMoveOnWhereHalfOfThemHaveRoomBesideTwo) {
  EXPECT_EQ(LoopsOf(std::vector<uint64_t>(8, 10), 59).size(), 2u);
  const std::vector<VisitLoop> loops = LoopsOf(std::vector<uint64_t>(8, 10), 60);
  ASSERT_THAT(KindsOf(loops), ElementsAre(Kind::kNoneStays, Kind::kShareStays, Kind::kAllMoveOn));
  EXPECT_EQ(loops[2].stay.size(), 5u) << "beside one";
  EXPECT_EQ(loops[2].most_ahead_bytes, 40u) << "three of eight are away: three uses ahead";
}

TEST(VisitLoop, TheLargestMayStayAndAShareOfTheOthersBesideThreeOfThose) {
  const std::vector<VisitLoop> loops = LoopsOf({60, 10, 10, 10, 10, 10, 10, 60}, 170);
  ASSERT_FALSE(loops.empty());
  ASSERT_EQ(loops.back().kind, Kind::kLargestStay);
  ASSERT_EQ(loops.back().stay.size(), 4u) << "120 of the largest, and 170 - 120 - 30 of others";
  EXPECT_EQ(loops.back().stay[0], 0u);
  EXPECT_EQ(loops.back().stay[1], 7u);
  EXPECT_EQ(loops.back().stay[3] - loops.back().stay[2], 3u) << "half of the others apart";
}

TEST(VisitLoop, OneLargestMayStayWhereTwoHaveNoRoom) {
  const std::vector<VisitLoop> loops = LoopsOf({60, 10, 10, 10, 10, 10, 10, 50}, 105);
  ASSERT_THAT(KindsOf(loops), ElementsAre(Kind::kNoneStays)) << "60, 50 and two more do not fit";
  const std::vector<VisitLoop> larger = LoopsOf({60, 50, 10, 10, 10, 10, 10, 10}, 145);
  ASSERT_EQ(larger.back().kind, Kind::kLargestStay);
  EXPECT_THAT(larger.back().stay, UnorderedElementsAre(0, 1));
}

TEST(VisitLoop, OfThoseThatAreAsLargeAllStayOrNone) {
  const std::vector<uint64_t> sizes = {80, 10, 10, 60, 10, 10, 60, 10, 10, 60, 10, 10};
  for (uint64_t window = 90; window < 400; ++window) {
    const VisitLoop loop = LoopsOf(sizes, window).back();
    if (loop.kind != Kind::kLargestStay) continue;
    const bool has_room = window > 80 + 3 * 60 + 3 * 10;
    for (const uint32_t object : {3, 6, 9}) {
      EXPECT_EQ(std::count(loop.stay.begin(), loop.stay.end(), object), has_room ? 1 : 0) << window;
    }
  }
}

TEST(VisitLoop, NoneIsLargeWhereThreeOthersNeedAsMuchRoomAsTheTwoLargest) {
  EXPECT_EQ(LoopsOf({13, 8, 8, 8, 8, 8, 8, 8}, 60).back().kind, Kind::kAllMoveOn);
  EXPECT_EQ(LoopsOf({13, 12, 8, 8, 8, 8, 8, 8}, 60).back().kind, Kind::kLargestStay);
}

TEST(VisitLoop, OfEqualObjectsNoneIsTheLargest) {
  for (uint64_t window = 10; window < 240; ++window) {
    for (const VisitLoop& loop : LoopsOf(std::vector<uint64_t>(24, 10), window)) {
      EXPECT_NE(loop.kind, Kind::kLargestStay) << window;
    }
  }
}

TEST(VisitLoop, WhatStaysLeavesRoomForWhatComesAndGoes) {
  const std::vector<uint64_t> sizes = {4, 16, 7, 64, 3, 3, 64, 16, 9, 256, 5, 1};
  for (uint64_t window = 1; window < 448; ++window) {
    for (const VisitLoop& loop : LoopsOf(sizes, window)) {
      uint64_t stay_bytes = 0, away_bytes = 0;
      std::vector<bool> stays(sizes.size());
      for (const uint32_t object : loop.stay) {
        EXPECT_FALSE(stays[object]) << object << " stays twice, window " << window;
        stays[object] = true;
        stay_bytes += sizes[object];
      }
      for (size_t object = 0; object < sizes.size(); ++object) {
        if (!stays[object]) away_bytes = std::max(away_bytes, sizes[object]);
      }
      if (loop.kind == Kind::kNoneStays) continue;
      EXPECT_LE(stay_bytes + away_bytes, window) << static_cast<int>(loop.kind);
    }
  }
}

TEST(LoopTrials, AWindowIsTriedOnceUntilSomethingElseIsDone) {
  LoopTrials trials;
  EXPECT_TRUE(trials.IsDue(10));
  trials.OnTrial(10);
  for (int round = 0; round < 100; ++round) trials.OnRound();
  EXPECT_FALSE(trials.IsDue(10));
  trials.Forget();
  EXPECT_TRUE(trials.IsDue(10));
}

TEST(LoopTrials, SomeWindowsAreTriedAtOnceAndThenOneInEightRounds) {
  LoopTrials trials;
  std::vector<int> tried;
  for (int round = 0; round < 32; ++round) {
    trials.OnRound();
    const uint64_t window_bytes = 100 + static_cast<uint64_t>(round);
    if (!trials.IsDue(window_bytes)) continue;
    trials.OnTrial(window_bytes);
    tried.push_back(round);
  }
  EXPECT_THAT(tried, ElementsAre(0, 1, 2, 8, 16, 24));
  EXPECT_EQ(trials.count(), tried.size());
}

TEST(LoopTrials, AWindowThatStaysIsTriedWithinEightRounds) {
  for (int changes = 1; changes < 40; ++changes) {
    LoopTrials trials;
    for (int round = 0; round < changes; ++round) {
      trials.OnRound();
      const uint64_t window_bytes = 1 + static_cast<uint64_t>(round);
      if (trials.IsDue(window_bytes)) trials.OnTrial(window_bytes);
    }
    int rounds = 1;
    for (trials.OnRound(); !trials.IsDue(0); trials.OnRound()) ++rounds;
    EXPECT_LE(rounds, 8) << changes;
  }
}

}  // namespace
}  // namespace pinion
