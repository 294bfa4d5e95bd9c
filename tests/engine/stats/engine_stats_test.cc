#include "pinion/engine/stats/engine_stats.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace pinion {
namespace {

using ::testing::HasSubstr;

TEST(EngineStatsTest, StatsOfNothingAreAllZero) {
  EXPECT_EQ(EngineStats().ToString(),
            "D2H: 0 transfers (0 B in 0 pieces and 0 chunks), 0 completed, 0 B in flight, 0 failed "
            "submits\n"
            "H2D: 0 transfers (0 B in 0 pieces and 0 chunks), 0 completed, 0 B in flight, 0 failed "
            "submits\n"
            "event waits: 0 enqueued, 0 not needed\n"
            "transient retries: 0\n");
}

TEST(EngineStatsTest, TimesArePrintedOnceAnythingWasTimedOrCouldNotBe) {
  struct Counts {
    uint64_t copies, stalls, untimed;
  };
  for (const Counts& counts :
       {Counts{1, 0, 0}, Counts{0, 1, 0}, Counts{0, 0, 1}, Counts{1, 1, 0}, Counts{1, 0, 1}}) {
    EngineStats stats;
    stats.d2h.copy_time.count = counts.copies;
    stats.d2h.stall_time.count = counts.stalls;
    stats.d2h.untimed = counts.untimed;
    EXPECT_THAT(stats.ToString(), HasSubstr("not timed"))
        << counts.copies << " copies, " << counts.stalls << " stalls, " << counts.untimed;
  }
}

}  // namespace
}  // namespace pinion
