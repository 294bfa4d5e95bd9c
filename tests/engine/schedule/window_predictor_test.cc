// Memory that a target leaves for streamed weights at each access.

#include <cstdint>
#include <optional>
#include <utility>

#include "gtest/gtest.h"
#include "pinion/engine/schedule/reservation.h"
#include "pinion/engine/schedule/weight_prefetcher.h"

namespace pinion {
namespace {

constexpr uint64_t kTarget = 1000;

// A program that accesses weights and allocates memory in between.
class Player {
 public:
  uint64_t Use(const WeightUse& use, const std::optional<PeakBound>& peak_bound = std::nullopt) {
    return room_.AtUse(use, others_, peak_bound);
  }
  void Allocate(uint64_t size_bytes) {
    others_.current += size_bytes;
    others_.allocated += size_bytes;
  }
  void AllocateAndFree(uint64_t size_bytes) {
    Allocate(size_bytes);
    Free(size_bytes);
  }
  void Free(uint64_t size_bytes) { others_.current -= size_bytes; }
  void ResetCounts() { others_.allocated = 0; }

 private:
  WindowPredictor room_{kTarget};
  OthersBytes others_;
};

TEST(WindowPredictor, APlaceThatWasNeverSeenHasNone) {
  Player player;
  EXPECT_EQ(player.Use({.object = 0}), 0u);
  EXPECT_EQ(player.Use({.object = 1}), 0u);
}

TEST(WindowPredictor, AKnownPlaceHasWhatTheTargetLeavesBesideWhatWillBeAllocated) {
  Player player;
  player.Use({.object = 0});
  player.Allocate(100);
  player.Free(60);
  player.Use({.object = 1});
  EXPECT_EQ(player.Use({.object = 0}), kTarget - 40 - 100) << "what is freed does not count";
}

TEST(WindowPredictor, TheMostThatHasFollowedAPlaceCounts) {
  Player player;
  for (const uint64_t bytes : {100, 300, 200}) {
    player.Use({.object = 0});
    player.AllocateAndFree(bytes);
    player.Use({.object = 1});
  }
  EXPECT_EQ(player.Use({.object = 0}), kTarget - 300);
}

TEST(WindowPredictor, LargerArgumentsLeaveNoneUntilTheyAreKnown) {
  Player player;
  for (const uint64_t bytes : {10, 20}) {
    EXPECT_EQ(player.Use({.object = 0, .argument_bytes = bytes}), 0u) << bytes;
    player.AllocateAndFree(10 * bytes);
    player.Use({.object = 1});
  }
  EXPECT_EQ(player.Use({.object = 0, .argument_bytes = 20}), kTarget - 200);
  player.Use({.object = 1});
  EXPECT_EQ(player.Use({.object = 0, .argument_bytes = 5}), kTarget - 200) << "smaller ones";
}

TEST(WindowPredictor, ForwardAndBackwardWithAndWithoutAGraphAreOtherPlaces) {
  Player player;
  for (const uint64_t room : {uint64_t{0}, kTarget}) {
    for (int flags = 0; flags < 4; ++flags) {
      const WeightUse use = {
          .object = 0, .builds_graph = (flags & 1) != 0, .in_backward = (flags & 2) != 0};
      EXPECT_EQ(player.Use(use), room) << flags;
      player.Use({.object = 1});
    }
  }
}

// A layer that is used twice; the backward follows its last use.
TEST(WindowPredictor, WhereAGraphIsBuiltEachUseOfOneForwardIsAPlace) {
  const WeightUse shared = {.object = 0, .builds_graph = true};
  const WeightUse between = {.object = 1, .builds_graph = true};
  const WeightUse backward = {.object = 0, .in_backward = true};
  Player player;
  for (int step = 0; step < 2; ++step) {
    EXPECT_EQ(player.Use(shared), step == 0 ? 0 : kTarget - 100);
    player.AllocateAndFree(100);
    player.Use(between);
    EXPECT_EQ(player.Use(shared), step == 0 ? 0 : kTarget - 500);
    player.AllocateAndFree(500);
    EXPECT_EQ(player.Use(backward), step == 0 ? 0 : kTarget);
  }
}

TEST(WindowPredictor, EachUseInARowIsAPlace) {
  Player player;
  const auto row = [&] {
    const uint64_t first = player.Use({.object = 0});
    player.AllocateAndFree(100);
    const uint64_t second = player.Use({.object = 0});
    player.AllocateAndFree(500);
    player.Use({.object = 1});
    return std::pair(first, second);
  };
  EXPECT_EQ(row(), std::pair(uint64_t{0}, uint64_t{0}));
  EXPECT_EQ(row(), std::pair(kTarget - 100, kTarget - 500));
}

TEST(WindowPredictor, ThePeakBoundCountsWhereSomethingMovesButNotInANewPlace) {
  const PeakBound peak_bound = {.most_bytes = 400, .moves = true};
  Player player;
  EXPECT_EQ(player.Use({.object = 0}, peak_bound), 0u);
  player.AllocateAndFree(700);
  player.Use({.object = 1});
  EXPECT_EQ(player.Use({.object = 0}, peak_bound), kTarget - 400);
  EXPECT_EQ(player.Use({.object = 1}, peak_bound), kTarget - 400) << "though 700 came here before";
  EXPECT_EQ(player.Use({.object = 0, .argument_bytes = 1}, peak_bound), 0u);
}

TEST(WindowPredictor, WhatIsThereCountsThoughTheBoundIsLess) {
  const PeakBound peak_bound = {.most_bytes = 400, .moves = true};
  Player player;
  player.Use({.object = 0}, peak_bound);
  player.Use({.object = 1}, peak_bound);
  player.Allocate(500);
  EXPECT_EQ(player.Use({.object = 0}, peak_bound), kTarget - 500);
}

TEST(WindowPredictor, WhereNothingMovesTheLesserOfTheBoundAndWhatWasSeenCounts) {
  const PeakBound peak_bound = {.most_bytes = 400, .moves = false};
  Player player;
  for (int round = 0; round < 2; ++round) {
    const uint64_t first = player.Use({.object = 0}, peak_bound);
    player.AllocateAndFree(700);
    const uint64_t second = player.Use({.object = 1}, peak_bound);
    EXPECT_EQ(first, round == 0 ? 0u : kTarget - 400);
    EXPECT_EQ(second, round == 0 ? 0u : kTarget);
  }
}

TEST(WindowPredictor, AnObjectThatIsUsedOnAndOnIsInAKnownPlace) {
  Player player;
  uint64_t room = 0;
  for (int use = 0; use < 1000; ++use) {
    room = player.Use({.object = 0});
    player.AllocateAndFree(10);
  }
  EXPECT_EQ(room, kTarget - 10);
}

TEST(WindowPredictor, OthersThatHaveMoreThanTheTargetLeaveNone) {
  Player player;
  player.Use({.object = 0});
  player.Allocate(2 * kTarget);
  player.Use({.object = 1});
  EXPECT_EQ(player.Use({.object = 0}), 0u);
}

TEST(WindowPredictor, WhereCountsWereResetThePlaceIsForgotten) {
  Player player;
  player.Use({.object = 0});
  player.Allocate(100);
  player.Use({.object = 1});
  player.Use({.object = 0});
  player.ResetCounts();
  player.Use({.object = 1});
  EXPECT_EQ(player.Use({.object = 0}), 0u);
}

}  // namespace
}  // namespace pinion
