// Runs LibTorch's table of operators on the emulated device, with and without offload: op_table.py.

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "pinion/tests/support/python_with_torch.h"

namespace pinion::testing {
namespace {

class OpTableTest : public ::testing::TestWithParam<std::string> {};

TEST_P(OpTableTest, HasTheBitsOfTheCpuWithOffloadAndWithout) {
  const std::string python = PythonWithTorch("torch, numpy, expecttest, sympy");
  if (python.empty()) GTEST_SKIP() << kNoPythonWithTorch;
  // RunProgram would hide the script's progress.
  const std::string command =
      python + " -B tests/hooks/emulated/op_table.py tests/hooks/emulated/libop_table.so " +
      GetParam();
  EXPECT_EQ(std::system(command.c_str()), 0);
}

INSTANTIATE_TEST_SUITE_P(Types, OpTableTest,
                         ::testing::Values("float32", "float64", "complex128", "bfloat16"),
                         [](const auto& type) { return type.param; });

}  // namespace
}  // namespace pinion::testing
