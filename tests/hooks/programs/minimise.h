// Reduces a failing Program to a minimal one that fails in the same way.

#ifndef PINION_TESTS_HOOKS_PROGRAMS_MINIMISE_H_
#define PINION_TESTS_HOOKS_PROGRAMS_MINIMISE_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "pinion/tests/hooks/programs/program.h"
#include "pinion/tests/hooks/programs/run_program.h"

namespace pinion::testing {

// Removes operators and resets settings while `program`, which must fail, still `fails`.
Program Minimise(Program program, absl::FunctionRef<bool(const Program&)> fails);

// Returns the minimal program that fails like `program`, line by line, and the command to run it.
std::string DescribeMinimal(const Program& program, const Verdict& verdict);

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_PROGRAMS_MINIMISE_H_
