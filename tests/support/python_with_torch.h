// Finds a Python that can import torch, for tests that run programs in it.

#ifndef PINION_TESTS_SUPPORT_PYTHON_WITH_TORCH_H_
#define PINION_TESTS_SUPPORT_PYTHON_WITH_TORCH_H_

#include <cstdlib>
#include <string>

#include "pinion/tests/support/run_program.h"

namespace pinion::testing {

inline constexpr char kNoPythonWithTorch[] =
    "no Python that can import torch: tools/python_with_torch.sh prints one for PINION_TEST_PYTHON";

// Returns PINION_TEST_PYTHON if it is set, else the Python that LibTorch was installed with.
// Returns "" if that Python cannot import `modules`. The latter happens for a wheel installed
// without its CUDA libraries.
inline std::string PythonWithTorch(const std::string& modules = "torch") {
  const char* const given = std::getenv("PINION_TEST_PYTHON");
  const std::string python =
      given != nullptr ? given : PINION_TORCH_LIB_DIR "/../../../../../bin/python3";
  return RunProgram(python + " -c 'import " + modules + "'").exit_code == 0 ? python : "";
}

}  // namespace pinion::testing

#endif  // PINION_TESTS_SUPPORT_PYTHON_WITH_TORCH_H_
