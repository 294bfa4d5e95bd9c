// Checks tensor classes that exist only in Python, in an offload scope: python_tensor_kinds.py.

#include <gtest/gtest.h>

#include <string>

#include "pinion/tests/support/python_with_torch.h"
#include "pinion/tests/support/run_program.h"

namespace pinion::testing {
namespace {

void RunTensorKinds(const std::string& part, const std::string& modules = "") {
  const std::string python = PythonWithTorch("torch, numpy, expecttest, sympy" + modules);
  if (python.empty()) GTEST_SKIP() << kNoPythonWithTorch;
  const ProgramOutcome run = RunProgram(python +
                                        " -B tests/hooks/emulated/python_tensor_kinds.py "
                                        "tests/hooks/emulated/libop_table.so " +
                                        part);
  EXPECT_EQ(run.exit_code, 0) << run.out << run.err;
}

TEST(PythonTensorKindsTest, WhatIsNotAPlainTensorRunsInAScopeAsWithoutOne) {
  RunTensorKinds("wrappers");
}

TEST(PythonTensorKindsTest, TorchCompileMayTraceInAScope) {
  RunTensorKinds("compile", ", filelock, networkx");
}

TEST(PythonTensorKindsTest, ANodeSeesTheClassAndTheIdentityOfWhatTheProgramStillHas) {
  RunTensorKinds("classes");
}

TEST(PythonTensorKindsTest, CompiledAutogradRefusesWhatAScopeHasSavedByName) {
  RunTensorKinds("compiled_autograd");
}

TEST(PythonTensorKindsTest, ANestedTensorOfTheStridedLayoutIsRefusedByName) {
  RunTensorKinds("nested");
}

}  // namespace
}  // namespace pinion::testing
