#include "pinion/hooks/offload_options.h"

#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/status_macros.h"

namespace pinion {

absl::Status OffloadOptions::Validate() const {
  if (eviction_window_bytes == 0 || prefetch_window_bytes == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        eviction_window_bytes == 0 ? "eviction_window_bytes" : "prefetch_window_bytes",
        " is 0: a copy needs a window to run in. Use OffloadOptions::kAutoWindow, or overlap = "
        "false for copies that block"));
  }
  PINION_RETURN_IF_ERROR(allocator.Validate());
  return engine.Validate();
}

}  // namespace pinion
