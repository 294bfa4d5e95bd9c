// Checks the upper bound of memory that nobody reported. Bytes are small numbers here.

#include "pinion/hooks/autograd/torch_bridge.h"

#include "gtest/gtest.h"

namespace pinion::testing {
namespace {

constexpr AllocatorBytes kBegin = {.current = 10, .peak = 50, .allocated = 100};

TEST(MostBytesBetween, WhatIsReportedInFullIsItsPeak) {
  const AllocatorBytes end = {.current = 10, .peak = 50, .allocated = 120};
  EXPECT_EQ(MostBytesBetween(kBegin, end, {.peak_bytes = 30, .added_bytes = 20}), 30);
}

TEST(MostBytesBetween, UnreportedAllocationsCountAsNeverFreed) {
  const AllocatorBytes end = {.current = 10, .peak = 50, .allocated = 120};
  EXPECT_EQ(MostBytesBetween(kBegin, end, {.peak_bytes = 20, .added_bytes = 5}), 35);
}

TEST(MostBytesBetween, TheAllocatorsPeakBoundsThem) {
  const AllocatorBytes end = {.current = 10, .peak = 50, .allocated = 900};
  EXPECT_EQ(MostBytesBetween(kBegin, end, {.peak_bytes = 20}), 50);
}

TEST(MostBytesBetween, AfterTheProgramHasResetThePeakItBoundsNothing) {
  const AllocatorBytes end = {.current = 10, .peak = 15, .allocated = 180};
  EXPECT_EQ(MostBytesBetween(kBegin, end, {.peak_bytes = 20}), 100);
}

// As cudaMallocAsync's allocator, which has no total.
TEST(MostBytesBetween, ANewPeakCountsWhereAllocationsAreNotCounted) {
  const AllocatorBytes begin = {.current = 10, .peak = 50};
  const AllocatorBytes end = {.current = 10, .peak = 70};
  EXPECT_EQ(MostBytesBetween(begin, end, {.peak_bytes = 20, .added_bytes = 5}), 70);
}

}  // namespace
}  // namespace pinion::testing
