#include <ATen/Context.h>

#include <cstdlib>

#include "gtest/gtest.h"
#include "pinion/programs/accelerator.h"

namespace pinion {
namespace {

// With a warning only, attention's backward on CUDA would still not repeat its bits.
TEST(AskForRepeatableBits, RefusesOperatorsThatDoNotRepeatThemselves) {
  unsetenv("CUBLAS_WORKSPACE_CONFIG");
  AskForRepeatableBits();
  EXPECT_TRUE(at::globalContext().deterministicAlgorithms());
  EXPECT_FALSE(at::globalContext().deterministicAlgorithmsWarnOnly());
  EXPECT_STREQ(std::getenv("CUBLAS_WORKSPACE_CONFIG"), ":4096:8");
}

}  // namespace
}  // namespace pinion
