// Where the paths that a user typed are meant from.
//
// Thread safety: call it first thing in main.

#ifndef PINION_PROGRAMS_WORKING_DIRECTORY_H_
#define PINION_PROGRAMS_WORKING_DIRECTORY_H_

#include "absl/status/status.h"

namespace pinion {

// `bazel run` starts programs among their runfiles; this goes back to where the command was typed.
// Elsewhere it does nothing.
absl::Status EnterWorkingDirectory();

}  // namespace pinion

#endif  // PINION_PROGRAMS_WORKING_DIRECTORY_H_
