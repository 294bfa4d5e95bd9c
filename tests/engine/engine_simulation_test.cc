// Hundreds of random programs; //tests/engine:simulate runs any number.

#include "pinion/tests/engine/engine_simulation.h"

#include <cstdint>

#include "gtest/gtest.h"
#include "pinion/tests/support/sanitizers.h"

namespace pinion::testing {
namespace {

constexpr uint64_t kSeeds = RoundsWithoutThreads(300);

TEST(EngineSimulationTest, EveryClaimHoldsOnEverySeed) {
  uint64_t lost = 0;
  uint64_t stuck = 0;
  uint64_t retries = 0;
  uint64_t failed_submits = 0;
  uint64_t chunked = 0;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const SimulationResult result = SimulateEngine(seed);
    ASSERT_EQ(result.failure, "") << "seed " << seed;
    EXPECT_GE(result.operations, 200u) << "seed " << seed;
    lost += result.lost_device ? 1 : 0;
    stuck += result.stuck_device ? 1 : 0;
    retries += result.retries;
    failed_submits += result.failed_submits;
    chunked += result.chunks > result.transfers ? 1 : 0;
  }
  // Guards against scenarios that silently stop occurring.
  EXPECT_GT(lost, kSeeds / 30);
  EXPECT_GT(stuck, kSeeds / 30);
  EXPECT_GT(chunked, kSeeds / 5);
  EXPECT_GT(retries, kSeeds / 3);
  EXPECT_GT(failed_submits, kSeeds / 30);
}

}  // namespace
}  // namespace pinion::testing
