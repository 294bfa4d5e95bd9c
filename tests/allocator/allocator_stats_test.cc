#include "pinion/allocator/allocator_stats.h"

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion {
namespace {

using ::pinion::testing::IsOk;
using ::pinion::testing::StatusIs;
using ::testing::HasSubstr;

AllocatorStats Consistent() {
  AllocatorStats stats;
  stats.requested_bytes = {90, 90};
  stats.booked_bytes = {100, 200};
  stats.deferred_bytes = {50, 50};
  stats.cached_bytes = {850, 900};
  stats.locked_bytes = {1000, 1000};
  stats.allocations = 3;
  stats.hits = 2;
  stats.misses = 1;
  return stats;
}

void ExpectBroken(const AllocatorStats& stats, const char* invariant) {
  EXPECT_THAT(stats.CheckInvariants(), StatusIs(absl::StatusCode::kInternal, HasSubstr(invariant)));
}

TEST(AllocatorStatsTest, FreshAndConsistentStatisticsPass) {
  EXPECT_THAT(AllocatorStats().CheckInvariants(), IsOk());
  EXPECT_THAT(Consistent().CheckInvariants(), IsOk());
}

TEST(AllocatorStatsTest, EachBrokenInvariantIsNamed) {
  AllocatorStats stats = Consistent();
  stats.requested_bytes = {101, 101};
  ExpectBroken(stats, "requested <= booked");
  stats = Consistent();
  stats.booked_bytes = {1001, 1001};
  ExpectBroken(stats, "booked <= locked");
  stats = Consistent();
  stats.cached_bytes.current = 849;
  ExpectBroken(stats, "booked + deferred + cached == locked");
  stats = Consistent();
  stats.hits = 3;
  ExpectBroken(stats, "hits + misses == allocations");
  stats = Consistent();
  stats.deferred_bytes.peak = 49;
  ExpectBroken(stats, "current <= peak");
}

TEST(AllocatorStatsTest, TheTextNamesWhatWasUsedAndRefused) {
  AllocatorStats stats = Consistent();
  stats.watermark_refusals = 7;
  EXPECT_THAT(stats.ToString(), HasSubstr("booked 100 B (peak 200 B)"));
  EXPECT_THAT(stats.ToString(), HasSubstr("refusals 7"));
}

}  // namespace
}  // namespace pinion
