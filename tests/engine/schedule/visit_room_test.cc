// Memory that a target leaves for streamed weights at each access.

#include "pinion/engine/schedule/visit_room.h"

#include <cstdint>
#include <optional>
#include <utility>

#include "gtest/gtest.h"
#include "pinion/engine/schedule/set_aside.h"

namespace pinion {
namespace {

constexpr uint64_t kTarget = 1000;

// A program that accesses weights and allocates memory in between.
class Player {
 public:
  uint64_t Use(const VisitUse& use, const std::optional<StepPromise>& promise = std::nullopt) {
    return room_.AtUse(use, others_, promise);
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
  VisitRoom room_{kTarget};
  OthersBytes others_;
};

TEST(VisitRoom, APlaceThatWasNeverSeenHasNone) {
  Player player;
  EXPECT_EQ(player.Use({.object = 0}), 0u);
  EXPECT_EQ(player.Use({.object = 1}), 0u);
}

TEST(VisitRoom, AKnownPlaceHasWhatTheTargetLeavesBesideWhatWillBeAllocated) {
  Player player;
  player.Use({.object = 0});
  player.Allocate(100);
  player.Free(60);
  player.Use({.object = 1});
  EXPECT_EQ(player.Use({.object = 0}), kTarget - 40 - 100) << "what is freed does not count";
}

TEST(VisitRoom, TheMostThatHasFollowedAPlaceCounts) {
  Player player;
  for (const uint64_t bytes : {100, 300, 200}) {
    player.Use({.object = 0});
    player.AllocateAndFree(bytes);
    player.Use({.object = 1});
  }
  EXPECT_EQ(player.Use({.object = 0}), kTarget - 300);
}

TEST(VisitRoom, LargerArgumentsLeaveNoneUntilTheyAreKnown) {
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

TEST(VisitRoom, ForwardAndBackwardWithAndWithoutAGraphAreOtherPlaces) {
  Player player;
  for (const uint64_t room : {uint64_t{0}, kTarget}) {
    for (int flags = 0; flags < 4; ++flags) {
      const VisitUse use = {
          .object = 0, .builds_graph = (flags & 1) != 0, .in_backward = (flags & 2) != 0};
      EXPECT_EQ(player.Use(use), room) << flags;
      player.Use({.object = 1});
    }
  }
}

// A layer that is used twice; the backward follows its last use.
TEST(VisitRoom, WhereAGraphIsBuiltEachUseOfOneForwardIsAPlace) {
  const VisitUse shared = {.object = 0, .builds_graph = true};
  const VisitUse between = {.object = 1, .builds_graph = true};
  const VisitUse backward = {.object = 0, .in_backward = true};
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

TEST(VisitRoom, EachUseInARowIsAPlace) {
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

TEST(VisitRoom, WhatIsPromisedCountsWhereSomethingMovesButNotInANewPlace) {
  const StepPromise promise = {.most_bytes = 400, .moves = true};
  Player player;
  EXPECT_EQ(player.Use({.object = 0}, promise), 0u);
  player.AllocateAndFree(700);
  player.Use({.object = 1});
  EXPECT_EQ(player.Use({.object = 0}, promise), kTarget - 400);
  EXPECT_EQ(player.Use({.object = 1}, promise), kTarget - 400) << "though 700 came here before";
  EXPECT_EQ(player.Use({.object = 0, .argument_bytes = 1}, promise), 0u);
}

TEST(VisitRoom, WhatIsThereCountsThoughLessIsPromised) {
  const StepPromise promise = {.most_bytes = 400, .moves = true};
  Player player;
  player.Use({.object = 0}, promise);
  player.Use({.object = 1}, promise);
  player.Allocate(500);
  EXPECT_EQ(player.Use({.object = 0}, promise), kTarget - 500);
}

TEST(VisitRoom, WhereNothingMovesTheLesserOfWhatIsPromisedAndWhatWasSeenCounts) {
  const StepPromise promise = {.most_bytes = 400, .moves = false};
  Player player;
  for (int round = 0; round < 2; ++round) {
    const uint64_t first = player.Use({.object = 0}, promise);
    player.AllocateAndFree(700);
    const uint64_t second = player.Use({.object = 1}, promise);
    EXPECT_EQ(first, round == 0 ? 0u : kTarget - 400);
    EXPECT_EQ(second, round == 0 ? 0u : kTarget);
  }
}

TEST(VisitRoom, AnObjectThatIsUsedOnAndOnIsInAKnownPlace) {
  Player player;
  uint64_t room = 0;
  for (int use = 0; use < 1000; ++use) {
    room = player.Use({.object = 0});
    player.AllocateAndFree(10);
  }
  EXPECT_EQ(room, kTarget - 10);
}

TEST(VisitRoom, OthersThatHaveMoreThanTheTargetLeaveNone) {
  Player player;
  player.Use({.object = 0});
  player.Allocate(2 * kTarget);
  player.Use({.object = 1});
  EXPECT_EQ(player.Use({.object = 0}), 0u);
}

TEST(VisitRoom, WhereCountsWereResetThePlaceIsForgotten) {
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
