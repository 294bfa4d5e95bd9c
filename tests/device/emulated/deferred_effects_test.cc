#include "pinion/device/emulated/deferred_effects.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace pinion {
namespace {

// Each stream copies into its own byte.
class DeferredEffectsTest : public ::testing::Test {
 protected:
  void Copy(int stream, uint64_t seq) {
    effects_.AddCopy({stream, seq}, {{&applied_[stream], &values_[seq], 1}});
  }

  DeferredEffects effects_{/*seed=*/1};
  char values_[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  char applied_[4] = {};  // each stream's last applied copy
};

TEST_F(DeferredEffectsTest, ForcingAPointAppliesWhatItDependsOnAndNoMore) {
  Copy(0, 1);
  Copy(0, 2);
  Copy(1, 1);
  effects_.AddWait({1, 2}, {0, 1});
  Copy(1, 3);
  Copy(1, 4);
  EXPECT_TRUE(effects_.Force({1, 1}));
  EXPECT_EQ(applied_[0], 0);
  EXPECT_TRUE(effects_.Force({1, 3}));
  EXPECT_EQ(applied_[0], 1);
  EXPECT_EQ(applied_[1], 3);
}

TEST_F(DeferredEffectsTest, NothingPassesAnObstacleNorAWaitForIt) {
  Copy(0, 1);
  effects_.AddObstacle({0, 2});
  Copy(0, 3);
  effects_.AddWait({1, 1}, {0, 2});
  Copy(1, 2);
  effects_.AddWait({2, 1}, {0, 1});
  Copy(2, 2);
  EXPECT_FALSE(effects_.Force({1, 2}));
  EXPECT_EQ(applied_[0], 1) << "what could be applied has been";
  for (int i = 0; i < 1000; ++i) effects_.ApplySome();
  EXPECT_EQ(applied_[0], 1);
  EXPECT_EQ(applied_[1], 0);
  EXPECT_EQ(applied_[2], 2) << "its wait is for what came before the obstacle";
  EXPECT_TRUE(effects_.Force({3, 1})) << "a stream of which nothing was ever heard";
}

TEST_F(DeferredEffectsTest, SomeIsOneEffectInTwoCalls) {
  constexpr int kCalls = 3000;
  std::vector<char> done(2 * kCalls);
  const char one = 1;
  for (int i = 0; i < 2 * kCalls; ++i) {
    effects_.AddCopy({0, static_cast<uint64_t>(i + 1)}, {{&done[i], &one, 1}});
  }
  for (int i = 0; i < kCalls; ++i) effects_.ApplySome();
  int applied = 0;
  for (const char is_done : done) applied += is_done;
  EXPECT_GT(applied, 0.45 * kCalls);
  EXPECT_LT(applied, 0.55 * kCalls);
}

}  // namespace
}  // namespace pinion
