// With PINION_COPY_LOOP=1 in the environment, which the BUILD file sets.

#include "gtest/gtest.h"
#include "pinion/device/cuda/cuda_api.h"

namespace pinion {
namespace {

TEST(CopyLoopTest, TheEnvironmentTakesTheBatchCallAwayWithoutARebuild) {
  EXPECT_EQ(RealCudaApi().MemcpyBatchAsync, nullptr);
}

}  // namespace
}  // namespace pinion
