#include "pinion/bench/offload/random_step.h"

#include <cstddef>
#include <cstdint>

#include "gtest/gtest.h"
#include "pinion/allocator/base/bytes.h"
#include "pinion/engine/planner/step_trace.h"
#include "pinion/tests/support/status_matchers.h"

namespace pinion::testing {
namespace {

TEST(RandomStepTest, AStepOfAsManyUsesAsIsAskedForIsValid) {
  for (const size_t uses : {1000, 5000, 20000}) {
    SCOPED_TRACE(uses);
    const StepTrace random = RandomStepOfUses(/*seed=*/1, uses);
    const StepTrace gpt = GptLikeStep(uses, 4 * kMiB);
    EXPECT_THAT(random.Validate(), IsOk());
    EXPECT_THAT(gpt.Validate(), IsOk());
    EXPECT_NEAR(static_cast<double>(random.accesses.size()), static_cast<double>(uses),
                0.05 * uses);
    EXPECT_NEAR(static_cast<double>(gpt.accesses.size()), static_cast<double>(uses), 0.05 * uses);
  }
}

// The ratio of bytes to compute time stays the same.
TEST(RandomStepTest, AShrunkStepIsTheSameStepWithSmallerTensors) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    const StepTrace step = RandomStep(seed, /*shrink=*/1);
    const StepTrace shrunk = RandomStep(seed, /*shrink=*/4);
    ASSERT_THAT(shrunk.Validate(), IsOk());
    EXPECT_EQ(step.accesses, shrunk.accesses);
    EXPECT_DOUBLE_EQ(step.compute_us(), 4 * shrunk.compute_us());
    for (size_t i = 0; i < step.objects.size(); ++i) {
      EXPECT_LE(shrunk.objects[i].size_bytes, step.objects[i].size_bytes);
    }
  }
}

}  // namespace
}  // namespace pinion::testing
