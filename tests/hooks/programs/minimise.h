// Makes a failing Program as small as it gets while it fails in the same way.

#ifndef PINION_TESTS_HOOKS_PROGRAMS_MINIMISE_H_
#define PINION_TESTS_HOOKS_PROGRAMS_MINIMISE_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "pinion/tests/hooks/programs/program.h"
#include "pinion/tests/hooks/programs/run_program.h"

namespace pinion::testing {

// Removes operators and sets settings back, one at a time, until no such step leaves a program that
// `fails`, which `program` does.
Program Minimise(Program program, absl::FunctionRef<bool(const Program&)> fails);

// The minimal program that fails as `program` does, line by line, and the command that runs it.
std::string DescribeMinimal(const Program& program, const Verdict& verdict);

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_PROGRAMS_MINIMISE_H_
