#include "pinion/allocator/allocator_stats.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "pinion/tests/support/allocator_invariants.h"
#include "pinion/tests/support/status_matchers.h"
#include "pinion/tests/support/status_says.h"

namespace pinion {
namespace {

using ::pinion::testing::CheckInvariants;
using ::pinion::testing::IsInternalError;
using ::pinion::testing::IsOk;

AllocatorStats Consistent() {
  AllocatorStats stats;
  stats.requested_bytes = {90, 90, 300};
  stats.booked_bytes = {100, 200, 400};
  stats.deferred_bytes = {50, 50, 60};
  stats.used_bytes = {150, 250, 400};
  stats.cached_bytes = {850, 900, 2000};
  stats.locked_bytes = {1000, 1000, 1500};
  stats.pageable_bytes = {5, 6, 7};
  stats.allocations = 5;
  stats.hits = 2;
  stats.polled_hits = 1;
  stats.waits_for_deferred = 1;
  stats.waited_hits = 1;
  stats.misses = 1;
  stats.pageable_allocations = 2;
  stats.pin_calls = 3;
  stats.pin_failures = 1;
  stats.pin_ms = 30;
  stats.max_pin_ms = 20;
  stats.unpin_calls = 1;
  stats.size_buckets = {
      {.from_bytes = 64, .allocations = 3, .misses = 1, .booked_bytes = {100, 200, 400}}};
  stats.numa_nodes = {{.numa_node = 0, .segments = 1, .locked_bytes = 400, .used_bytes = 50},
                      {.numa_node = 1, .segments = 2, .locked_bytes = 600, .used_bytes = 100}};
  return stats;
}

TEST(AllocatorStatsTest, FreshAndConsistentStatisticsPass) {
  EXPECT_THAT(CheckInvariants(AllocatorStats()), IsOk());
  EXPECT_EQ(AllocatorStats().max_pin_ms + AllocatorStats().max_unpin_ms, 0);
  EXPECT_THAT(CheckInvariants(Consistent()), IsOk());
}

TEST(AllocatorStatsTest, EachBrokenInvariantIsNamed) {
  const auto expect_broken = [](const char* invariant, const auto& change) {
    AllocatorStats stats = Consistent();
    change(stats);
    EXPECT_THAT(CheckInvariants(stats), IsInternalError(invariant));
  };
  using Stats = AllocatorStats;
  expect_broken("requested <= booked", [](Stats& s) { s.requested_bytes.current = 101; });
  expect_broken("requested <= booked", [](Stats& s) { s.requested_bytes.peak = 201; });
  expect_broken("booked <= used", [](Stats& s) { s.booked_bytes.current = 151; });
  expect_broken("used <= locked", [](Stats& s) { s.used_bytes.peak = 1001; });
  expect_broken("booked + deferred == used", [](Stats& s) { s.deferred_bytes.current = 49; });
  expect_broken("used + cached == locked", [](Stats& s) { s.cached_bytes.current = 849; });
  expect_broken("== allocations", [](Stats& s) { s.hits = 3; });
  expect_broken("polled_hits + waited_hits <= hits", [](Stats& s) { s.polled_hits = 2; });
  expect_broken("waited_hits <= waits", [](Stats& s) { s.waits_for_deferred = 0; });
  expect_broken("pin_failures <= pin_calls", [](Stats& s) { s.pin_failures = 4; });
  expect_broken("current <= peak", [](Stats& s) { s.deferred_bytes.peak = 49; });
  expect_broken("peak <= total", [](Stats& s) { s.cached_bytes.total = 899; });
  expect_broken("size buckets", [](Stats& s) { s.size_buckets[0].allocations = 2; });
  expect_broken("size buckets", [](Stats& s) { s.size_buckets[0].booked_bytes.current = 99; });
  expect_broken("NUMA nodes", [](Stats& s) { s.numa_nodes[0].used_bytes = 51; });
  expect_broken("NUMA nodes", [](Stats& s) { s.numa_nodes.pop_back(); });
}

TEST(AllocatorStatsTest, TheTextSaysEverythingThatWasCounted) {
  AllocatorStats stats = Consistent();
  stats.pageable_bytes = {};  // unused counters are left out
  stats.failures = 11;
  stats.unpin_ms = 12;
  stats.max_unpin_ms = 13;
  stats.trims = 14;
  stats.growth_retries = 15;
  stats.growth_waits = 16;
  stats.watermark_warnings = 17;
  stats.watermark_refusals = 18;
  stats.limit_refusals = 19;
  stats.source_refusals = 20;
  stats.leaked_bytes = 21;
  EXPECT_EQ(
      stats.ToString(),
      "requested 90 B (peak 90 B)  booked 100 B (peak 200 B)  deferred 50 B (peak 50 B)  "
      "used 150 B (peak 250 B)  cached 850 B (peak 900 B)  locked 0.977 KiB (peak 0.977 KiB)  \n"
      "allocations 5: hits 2 (after a poll 1, after a wait 1 of 1), misses 1, pageable 2; "
      "failures 11\n"
      "pin calls 3 (1 failed, 30 ms, at most 20)  unpin calls 1 (12 ms, at most 13)  trims "
      "14  growth retries 15, waits 16\n"
      "watermark warnings 17  refusals by the watermark 18, the limit 19, the source 20  "
      "leaked 21 B\n"
      "from 64 B: 3 allocations, 1 misses, booked 100 B (peak 200 B)\n"
      "NUMA node 0: 1 segments, 50 B of 400 B used\n"
      "NUMA node 1: 2 segments, 100 B of 600 B used");
}

}  // namespace
}  // namespace pinion
