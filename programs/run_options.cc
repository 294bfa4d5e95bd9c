#include "pinion/programs/run_options.h"

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace pinion {

const char* OffloadModeName(OffloadMode mode) {
  switch (mode) {
    case OffloadMode::kNone:
      return "none";
    case OffloadMode::kBlocking:
      return "blocking";
    case OffloadMode::kPinion:
      return "pinion";
    case OffloadMode::kPlanned:
      return "planned";
  }
  return "unknown";
}

absl::StatusOr<OffloadMode> FindOffloadMode(const std::string& name) {
  for (const OffloadMode mode :
       {OffloadMode::kNone, OffloadMode::kBlocking, OffloadMode::kPinion, OffloadMode::kPlanned}) {
    if (name == OffloadModeName(mode)) return mode;
  }
  return absl::NotFoundError(
      absl::StrCat("--offload=", name, " is none of none, blocking, pinion, planned"));
}

}  // namespace pinion
