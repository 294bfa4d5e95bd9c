#include <vector>

#include "gtest/gtest.h"
#include "pinion/bench/attribution/attribution_table.h"

namespace pinion {
namespace {

// 1 MB takes 100 us over the link and 10 us of host arithmetic.
constexpr CopyRates kRates = {.link_gb_per_s = 10, .host_memory_gb_per_s = 100};
constexpr uint64_t kMb = 1'000'000;

TEST(CopyBoundTest, WhatTheStepHidesCostsNothing) {
  EXPECT_DOUBLE_EQ(CopyBoundUs({{0, kMb, kMb}, {150, kMb, kMb}}, 300, kRates), 300);
  EXPECT_DOUBLE_EQ(CopyBoundUs({}, 300, kRates), 300);
}

TEST(CopyBoundTest, WhatIsReadyLastCrossesTheLinkAndIsComputedWithAfterTheStep) {
  EXPECT_DOUBLE_EQ(CopyBoundUs({{300, kMb, 3 * kMb}}, 300, kRates), 430);
}

TEST(CopyBoundTest, TensorsQueueForTheLink) {
  EXPECT_DOUBLE_EQ(CopyBoundUs({{0, kMb}, {10, kMb}, {20, kMb}}, 50, kRates), 300);
}

TEST(CopyBoundTest, TensorsQueueForTheHost) {
  constexpr CopyRates kSlowHost = {.link_gb_per_s = 10, .host_memory_gb_per_s = 5};
  EXPECT_DOUBLE_EQ(CopyBoundUs({{0, kMb, kMb}, {0, kMb, kMb}}, 50, kSlowHost), 100 + 400);
}

TEST(CopyBoundTest, ALinkThatWaitedForATensorGoesOnFromThere) {
  EXPECT_DOUBLE_EQ(CopyBoundUs({{0, kMb}, {500, kMb}}, 510, kRates), 600);
}

}  // namespace
}  // namespace pinion
