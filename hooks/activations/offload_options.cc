#include "pinion/hooks/activations/offload_options.h"

#include "absl/strings/str_cat.h"
#include "pinion/allocator/base/status_macros.h"
#include "pinion/engine/link/link_calibration.h"

namespace pinion {

absl::Status OffloadOptions::Validate() const {
  if (eviction_window_bytes == 0 || prefetch_window_bytes == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        eviction_window_bytes == 0 ? "eviction_window_bytes" : "prefetch_window_bytes",
        " is 0: a copy needs a window to run in. Use OffloadOptions::kAutoWindow, or overlap = "
        "false for copies that block"));
  }
  if (eviction_window_tensors == 0) {
    return absl::InvalidArgumentError(
        "eviction_window_tensors is 0: a copy needs a window to run in, of one tensor at least. "
        "Leave it at OffloadOptions::kNoTensorWindow for a window in bytes");
  }
  if (eviction_window_tensors != kNoTensorWindow &&
      (eviction_window_bytes != kAutoWindow || memory_target_bytes != kNoTarget)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "eviction_window_tensors is ", eviction_window_tensors, ", and ",
        eviction_window_bytes != kAutoWindow ? "eviction_window_bytes" : "memory_target_bytes",
        " is set as well: leave one of them out"));
  }
  if (memory_target_bytes != kNoTarget) {
    if (!overlap) {
      return absl::InvalidArgumentError(
          "memory_target_bytes is set and overlap is not: copies that block are not planned. Leave "
          "one of them out");
    }
    if (eviction_window_bytes != kAutoWindow || prefetch_window_bytes != kAutoWindow) {
      return absl::InvalidArgumentError(
          "memory_target_bytes takes the place of eviction_window_bytes and prefetch_window_bytes: "
          "leave those at kAutoWindow");
    }
    if (link.has_value() && !(link->h2d_duplex_gb_per_s > 0 && link->d2h_duplex_gb_per_s > 0)) {
      return absl::InvalidArgumentError(
          "link has no duplex bandwidths (d2h_duplex_gb_per_s, h2d_duplex_gb_per_s), which a plan "
          "for memory_target_bytes needs: leave link empty, and the device is measured");
    }
  }
  if (link.has_value()) {
    if (const absl::Status valid = link->Validate(); !valid.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat(valid.message(), ", or leave OffloadOptions::link empty"));
    }
  }
  PINION_RETURN_IF_ERROR(allocator.Validate());
  return engine.Validate();
}

}  // namespace pinion
