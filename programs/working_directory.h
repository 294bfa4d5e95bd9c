// Resolves paths of the command line.
//
// Thread safety: call it first in main.

#ifndef PINION_PROGRAMS_WORKING_DIRECTORY_H_
#define PINION_PROGRAMS_WORKING_DIRECTORY_H_

#include "absl/status/status.h"

namespace pinion {

// `bazel run` starts programs in their runfiles. This returns to the folder of the command. Without
// `bazel run` it does nothing.
absl::Status EnterWorkingDirectory();

}  // namespace pinion

#endif  // PINION_PROGRAMS_WORKING_DIRECTORY_H_
