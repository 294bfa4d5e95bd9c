// Runs LibTorch's table of operators on the emulated device, with and without offload: op_table.py.

#include <gtest/gtest.h>

#include <string>

#include "pinion/tests/support/python_with_torch.h"
#include "pinion/tests/support/run_program.h"

namespace pinion::testing {
namespace {

class OpTableTest : public ::testing::TestWithParam<std::string> {};

TEST_P(OpTableTest, HasTheBitsOfTheCpuWithOffloadAndWithout) {
  const std::string python = PythonWithTorch("torch, numpy, expecttest, sympy");
  if (python.empty()) GTEST_SKIP() << kNoPythonWithTorch;
  const std::string command =
      python + " -B tests/hooks/emulated/op_table.py tests/hooks/emulated/libop_table.so " +
      GetParam();
  EXPECT_EQ(RunVisibly(command), 0);  // the script shows its progress
}

INSTANTIATE_TEST_SUITE_P(Types, OpTableTest,
                         ::testing::Values("float32", "float64", "complex128", "bfloat16"),
                         [](const auto& type) { return type.param; });

}  // namespace
}  // namespace pinion::testing
