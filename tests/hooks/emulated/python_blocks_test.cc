// Runs blocks of well-known networks within a memory target, from Python: python_blocks.py.

#include <gtest/gtest.h>

#include <string>

#include "pinion/tests/support/python_with_torch.h"
#include "pinion/tests/support/run_program.h"

namespace pinion::testing {
namespace {

TEST(PythonBlocksTest, KeepWithinTheirTargetFromTheFirstStepOnAndHaveTheSameBits) {
  const std::string python = PythonWithTorch("torch, numpy, expecttest, sympy");
  if (python.empty()) GTEST_SKIP() << kNoPythonWithTorch;
  const ProgramOutcome run = RunProgram(
      python + " -B tests/hooks/emulated/python_blocks.py tests/hooks/emulated/libop_table.so");
  EXPECT_EQ(run.exit_code, 0) << run.out << run.err;
}

}  // namespace
}  // namespace pinion::testing
