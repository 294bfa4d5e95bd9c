#include "pinion/programs/working_directory.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace pinion {

absl::Status EnterWorkingDirectory() {
  const char* const typed_in = std::getenv("BUILD_WORKING_DIRECTORY");
  if (typed_in == nullptr || chdir(typed_in) == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("cannot go to BUILD_WORKING_DIRECTORY=", typed_in, ": ", std::strerror(errno)));
}

}  // namespace pinion
