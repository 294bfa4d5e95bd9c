// Runs a Program on an emulated device with offload, and compares it with the same program without
// offload and without checkpoints.

#ifndef PINION_TESTS_HOOKS_PROGRAMS_RUN_PROGRAM_H_
#define PINION_TESTS_HOOKS_PROGRAMS_RUN_PROGRAM_H_

#include <cstdint>
#include <string>

#include "pinion/tests/hooks/programs/program.h"

namespace pinion::testing {

enum class FailureKind {
  kNone,
  kBits,         // a loss, gradient or parameter differs
  kOutOfMemory,  // the device, which has no more than the memory target, was asked for more
  kError,        // an exception that the program without offload does not throw
  kRace,
  kLeft,     // device bytes, host bytes or handles at the end
  kInvalid,  // the program fails without offload
};

struct Verdict {
  FailureKind kind = FailureKind::kNone;
  // For people. Of a program that passes: it had more than its target, and may
  // (docs/users/limits.md).
  std::string what;
  uint64_t refusals = 0;  // saved tensors that stayed on the device for want of host memory
  bool has_limit_from_first_save = false;  // it failed before, as idle streamed weights may

  std::string ToString() const;
};

Verdict RunProgram(const Program& program);

}  // namespace pinion::testing

#endif  // PINION_TESTS_HOOKS_PROGRAMS_RUN_PROGRAM_H_
