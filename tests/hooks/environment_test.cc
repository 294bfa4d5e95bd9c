// Checks that active environment variables are reported by name.

#include "pinion/hooks/environment.h"

#include <cstdlib>
#include <string>

#include "gtest/gtest.h"

namespace pinion::testing {
namespace environment_test {

// Launchers like Megatron's set it. According to NVIDIA it can halve the gain of overlapping copies
// (NVIDIA/Megatron-LM#6311).
TEST(Environment, ASingleConnectionOfCudaIsNamedToSessionsOnCuda) {
  for (const char* value : {"1", "8"}) {
    ASSERT_EQ(setenv("CUDA_DEVICE_MAX_CONNECTIONS", value, 1), 0);
    const std::string cuda = SwitchesThatAreOn("cuda"), emu = SwitchesThatAreOn("emu");
    ASSERT_EQ(unsetenv("CUDA_DEVICE_MAX_CONNECTIONS"), 0);
    EXPECT_EQ(cuda.find("CUDA_DEVICE_MAX_CONNECTIONS=1") != std::string::npos,
              std::string(value) == "1");
    EXPECT_EQ(emu, "");
  }
  EXPECT_EQ(SwitchesThatAreOn("cuda"), "");
}

TEST(Environment, SeveralSwitchesAreNamedInARow) {
  ASSERT_EQ(setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1), 0);
  const std::string one = SwitchesThatAreOn("cuda");
  ASSERT_EQ(setenv("PINION_VERIFY", "1", 1), 0);
  const std::string both = SwitchesThatAreOn("cuda");
  ASSERT_EQ(unsetenv("PINION_VERIFY"), 0);
  ASSERT_EQ(unsetenv("CUDA_DEVICE_MAX_CONNECTIONS"), 0);
  EXPECT_EQ(one.find("CUDA_DEVICE_MAX_CONNECTIONS=1"), 0u);
  EXPECT_EQ(both.find("PINION_VERIFY=1"), 0u);
  EXPECT_TRUE(both.ends_with(" and " + one)) << both;
}

}  // namespace environment_test
}  // namespace pinion::testing
