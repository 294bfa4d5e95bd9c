#include "pinion/engine/schedule/back_off.h"

#include <cstdint>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace pinion {
namespace {

using ::testing::ElementsAre;

// Returns the skipped attempts before each of the next `count` attempts, all of which are refused.
std::vector<int> PausesOf(BackOff& back_off, int count) {
  std::vector<int> pauses;
  for (int i = 0; i < count; ++i) {
    int left_out = 0;
    while (!back_off.MayTry()) ++left_out;
    pauses.push_back(left_out);
    back_off.Refused();
  }
  return pauses;
}

TEST(BackOffTest, NothingIsLeftOutBeforeARefusal) {
  BackOff back_off;
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(back_off.MayTry());
}

TEST(BackOffTest, PausesDoubleWithEachRefusalUpToTheLongest) {
  BackOff back_off;
  EXPECT_THAT(PausesOf(back_off, 14),
              ElementsAre(0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024, 1024));
}

TEST(BackOffTest, AfterAPauseEveryAttemptMayBeMadeUntilTheNextRefusal) {
  BackOff back_off;
  back_off.Refused();
  EXPECT_FALSE(back_off.MayTry());
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(back_off.MayTry());
}

TEST(BackOffTest, AnAttemptThatWorkedMakesTheNextPauseShortAgain) {
  BackOff back_off;
  PausesOf(back_off, 5);
  while (!back_off.MayTry()) continue;
  back_off.Worked();
  EXPECT_THAT(PausesOf(back_off, 3), ElementsAre(0, 1, 2));
}

// The successful attempt began before the last refusal.
TEST(BackOffTest, AnAttemptThatWorkedDoesNotEndAPauseThatHasBegun) {
  BackOff back_off;
  back_off.Refused();
  back_off.Refused();
  back_off.Worked();
  EXPECT_FALSE(back_off.MayTry());
  EXPECT_FALSE(back_off.MayTry());
  EXPECT_TRUE(back_off.MayTry());
}

}  // namespace
}  // namespace pinion
