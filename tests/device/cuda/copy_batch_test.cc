// Runs with PINION_COPY_BATCH=1, which the BUILD file sets.

#include "gtest/gtest.h"
#include "pinion/device/cuda/cuda_api.h"

namespace pinion {
namespace {

TEST(CopyBatchTest, TheEnvironmentAsksForTheBatchCallWithoutARebuild) {
  EXPECT_NE(RealCudaApi().MemcpyBatchAsync, nullptr);
}

}  // namespace
}  // namespace pinion
