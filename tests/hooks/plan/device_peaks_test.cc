// Checks the memory peaks between two moments, and which memory was freed.

#include "pinion/hooks/plan/device_peaks.h"

#include <optional>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace pinion {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(DevicePeaks, PeaksAreThoseSinceTheLastMoment) {
  DevicePeaks peaks;
  peaks.OnDeviceBytes(50, nullptr);
  peaks.OnDeviceBytes(20, nullptr);
  EXPECT_EQ(peaks.Take(20, /*frees=*/std::nullopt).peak_bytes, 50);
  peaks.OnDeviceBytes(30, nullptr);
  EXPECT_EQ(peaks.Take(30, /*frees=*/std::nullopt).peak_bytes, 30);
  EXPECT_EQ(peaks.Take(30, /*frees=*/std::nullopt).peak_bytes, 30)
      << "what is allocated at both moments";
}

TEST(DevicePeaks, AllocationsAreCountedSinceTheLastMoment) {
  DevicePeaks peaks;
  peaks.OnDeviceBytes(50, nullptr, /*added_bytes=*/20);
  peaks.OnDeviceBytes(60, nullptr, /*added_bytes=*/10);
  EXPECT_EQ(peaks.Take(60, /*frees=*/std::nullopt).added_bytes, 30);
  EXPECT_EQ(peaks.Take(60, /*frees=*/std::nullopt).added_bytes, 0);
}

TEST(DevicePeaks, WhatIsHeldIsToldWhenItGoesWithThePeakFromThenOn) {
  DevicePeaks peaks;
  const char held[2] = {};
  const char other = 0;
  peaks.Hold(&held[0]);
  peaks.Hold(&held[1]);
  peaks.OnDeviceBytes(90, nullptr);
  peaks.OnDeviceBytes(80, &other);
  peaks.OnDeviceBytes(70, &held[1]);
  peaks.OnDeviceBytes(75, nullptr);
  peaks.OnDeviceBytes(40, &held[0]);
  peaks.OnDeviceBytes(60, nullptr);
  peaks.OnDeviceBytes(50, &held[0]);  // another tensor has this address now
  const DevicePeaks::Since since = peaks.Take(50, /*frees=*/std::nullopt);
  EXPECT_EQ(since.peak_bytes, 90);
  ASSERT_EQ(since.freed.size(), 2);
  EXPECT_EQ(since.freed[0].data, &held[1]);
  EXPECT_EQ(since.freed[0].later_peak_bytes, 75);
  EXPECT_EQ(since.freed[1].data, &held[0]);
  EXPECT_EQ(since.freed[1].later_peak_bytes, 60);
  EXPECT_THAT(peaks.Take(50, /*frees=*/std::nullopt).freed, IsEmpty());
}

TEST(DevicePeaks, AllThatWasFreedIsKnownWhereAsManyFreesAreToldAsTheAllocatorCounts) {
  DevicePeaks peaks;
  const char freed[2] = {};
  peaks.OnDeviceBytes(10, &freed[0]);
  EXPECT_FALSE(peaks.Take(10, 1).told_all) << "what was freed before anybody was told?";
  peaks.OnDeviceBytes(20, nullptr);
  peaks.OnDeviceBytes(5, &freed[1]);
  const DevicePeaks::Since since = peaks.Take(5, 2);
  EXPECT_TRUE(since.told_all);
  EXPECT_THAT(since.told, ElementsAre(&freed[1]));
  const DevicePeaks::Since nothing = peaks.Take(5, 2);
  EXPECT_TRUE(nothing.told_all);
  EXPECT_THAT(nothing.told, IsEmpty());
}

TEST(DevicePeaks, WhatIsFreedAndNotToldIsMissed) {
  DevicePeaks peaks;
  const char freed = 0;
  peaks.Take(10, 5);
  peaks.OnDeviceBytes(5, &freed);
  EXPECT_FALSE(peaks.Take(5, 7).told_all);
  EXPECT_TRUE(peaks.Take(5, 7).told_all) << "nothing since";
  EXPECT_FALSE(peaks.Take(5, 8).told_all);
}

TEST(DevicePeaks, WhereFreesAreNotCountedNobodyKnowsWhetherAllWereTold) {
  DevicePeaks peaks;
  peaks.Take(10, 5);
  EXPECT_FALSE(peaks.Take(10, /*frees=*/std::nullopt).told_all);
  EXPECT_FALSE(peaks.Take(10, 5).told_all);
}

TEST(DevicePeaks, OfVeryManyFreesNotAllAreKept) {
  DevicePeaks peaks;
  const char freed = 0;
  peaks.Take(10, 0);
  for (int i = 0; i < 5000; ++i) peaks.OnDeviceBytes(5, &freed);
  const DevicePeaks::Since since = peaks.Take(5, 5000);
  EXPECT_FALSE(since.told_all);
  EXPECT_LT(since.told.size(), 5000u);
}

TEST(DevicePeaks, WhatIsHeldNoLongerGoesUnseen) {
  DevicePeaks peaks;
  const char held[2] = {};
  peaks.Hold(&held[0]);
  peaks.Hold(&held[1]);
  peaks.Drop(&held[0]);
  peaks.OnDeviceBytes(10, &held[0]);
  EXPECT_THAT(peaks.Take(10, /*frees=*/std::nullopt).freed, IsEmpty());
  peaks.OnDeviceBytes(5, &held[1]);
  EXPECT_EQ(peaks.Take(5, /*frees=*/std::nullopt).freed.size(), 1);
}

}  // namespace
}  // namespace pinion
